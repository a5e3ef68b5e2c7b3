"""The billing guard's decisions, pure: which calls are suspect or audited, when a check passes, what follows.

A pipeline that enters a layer twice, or skips one, computes garbage and ends at once; its client must not pay
for that. So a completion that ended by itself after very few tokens on a route of several nodes is *suspect*:
held until the same prompt on another route confirms it. A share of all other calls is *audited* in the same
way, after they were charged, so that a node that computes wrongly is found even where its answers are long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from meshnet.tracker.books.records import BooksError

SETTING: Final = "guard"
"""The name of the setting that holds `GuardRules` as JSON."""
PPM: Final = 1_000_000
BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "min_tokens": (0, 64),
    "check_ms": (1_000, 86_400_000),
    "audit_ppm": (0, PPM),
    "max_gap": (0, 100),
    "max_attempts": (1, 100),
}
"""The least and the greatest value of each of the guard's thresholds."""

EndedBy = Literal["eos", "stop", "grammar", "tool", "limit", "cancel", "error"]
Cause = Literal["suspect", "audit"]
CaseState = Literal["waiting", "checking", "confirmed", "refuted", "unchecked"]


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The guard's thresholds.

    min_tokens    an end-of-sequence token after fewer output tokens than this is suspect (itself not counted)
    check_ms      how long a check may take to happen; afterwards a held call is released uncharged
    audit_ppm     calls per million that are audited
    max_gap       how far below the greatest logit a greedy token may lie on the checking route
    max_attempts  checks of one case that may fail to run (not: fail to confirm) before it is given up
    """

    min_tokens: int = 4
    check_ms: int = 3_600_000
    audit_ppm: int = 10_000
    max_gap: float = 1.5
    max_attempts: int = 3

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> GuardRules:
        """Reads the setting; what it does not name keeps its default. BooksError names a bad field."""
        if data is not None and not isinstance(data, Mapping):
            raise BooksError(f"guard is {data!r}; it is a JSON object", code="bad_setting", param="guard")
        values = dict(data or {})
        for name, value in values.items():
            if name not in BOUNDS:
                known = ", ".join(field.name for field in fields(cls))
                raise BooksError(
                    f"guard.{name} is not a setting; settings: {known}",
                    code="bad_setting",
                    param=f"guard.{name}",
                )
            kinds = (int, float) if name == "max_gap" else (int,)
            low, high = BOUNDS[name]
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise BooksError(
                    f"guard.{name} is {value!r}; it must be a number from {low} to {high}",
                    code="bad_setting",
                    param=f"guard.{name}",
                )
        return cls(**values)


def suspicion(output_tokens: int, ended_by: EndedBy, nodes: int, rules: GuardRules) -> str | None:
    """Why a completion is suspect; None when it is not.

    `output_tokens` without the end-of-sequence token, `nodes` the distinct nodes of its route. A single node
    has no border at which layers could be lost, and a stop string, grammar or limit ends short answers
    rightly.
    """
    if ended_by != "eos" or nodes < 2 or output_tokens >= rules.min_tokens:
        return None
    return f"ended by itself after {output_tokens} of at least {rules.min_tokens} tokens on {nodes} nodes"


def picked_for_audit(call_id: str, rules: GuardRules) -> bool:
    """True for a fixed share of call ids, the same on every tracker and after every restart."""
    drawn = int.from_bytes(hashlib.sha256(b"audit\0" + call_id.encode()).digest()[:8], "big")
    return drawn % PPM < rules.audit_ppm


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """One produced token (the end-of-sequence token included) as the checking route sees it.

    token      the token that was produced
    logit      its logit on the checking route
    max_logit  the greatest logit there
    drawn      the token that the checking route picks itself, with the same seed and position
    kept       whether the token lies in the set that the sampler keeps there (top_k, top_p, min_p); greedy
               calls do not ask
    """

    token: int
    logit: float
    max_logit: float
    drawn: int
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check confirms the answer.

    `worst_gap` is the largest distance to a maximum, `at` its position.
    """

    passed: bool
    worst_gap: float
    at: int | None
    reason: str


def compare(
    checks: Sequence[TokenCheck], *, produced: int, greedy: bool, same_class: bool, rules: GuardRules
) -> Verdict:
    """Compares an answer of `produced` tokens with what another route makes of the same prompt and tokens.

    Greedy: each token's logit lies within `max_gap` of the maximum. Sampled: each token lies in the kept set.
    Only within one numerics class, where the same tokens are the same bits, must the route draw the same
    tokens itself. A check that did not see every token confirms nothing.
    """
    if not checks or len(checks) != produced:
        return Verdict(False, 0.0, None, f"the check saw {len(checks)} of {produced} tokens")
    worst, worst_at = 0.0, 0
    for position, check in enumerate(checks):
        gap = check.max_logit - check.logit
        if not gap >= 0.0:
            # Also NaN: a route that computes no numbers confirms nothing.
            return Verdict(
                False, gap, position, f"token {position} has the logit {check.logit} of {check.max_logit}"
            )
        if gap > worst:
            worst, worst_at = gap, position
        if same_class and check.drawn != check.token:
            return Verdict(
                False,
                worst,
                position,
                f"token {position} is {check.token}, the same numerics draw {check.drawn}",
            )
        if not greedy and not check.kept:
            return Verdict(
                False, worst, position, f"token {position} ({check.token}) is outside the kept set"
            )
    if greedy and worst > rules.max_gap:
        return Verdict(
            False,
            worst,
            worst_at,
            f"token {worst_at} lies {worst:.2f} below the maximum (allowed {rules.max_gap})",
        )
    return Verdict(True, worst, worst_at, "confirmed")


@dataclass(frozen=True, slots=True)
class Case:
    """A call under suspicion or audit. `route` are its nodes, in order."""

    call_id: str
    cause: Cause
    model: str
    route: tuple[str, ...]
    reason: str
    opened_at: int
    state: CaseState = "waiting"
    attempts: int = 0
    closed_at: int | None = None

    @property
    def closed(self) -> bool:
        return self.state in ("confirmed", "refuted", "unchecked")


@dataclass(frozen=True, slots=True)
class Started:
    """A check of the case begins on another route."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A check ended with a verdict, on these nodes."""

    verdict: Verdict
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A check could not be carried to its end (a node left, a user's call needed the room).

    It may run again.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """No check can happen: no other route exists, or prompt and tokens are no longer in memory."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


CaseEvent = Started | Checked | Interrupted | Impossible | Tick


@dataclass(frozen=True, slots=True)
class Charge:
    """Charge the held call."""

    call_id: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release the held call, or refund the charged one."""

    call_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A check says something about these nodes: `passed` earns trust, `failed` and `unconfirmed` lose it."""

    nodes: tuple[str, ...]
    kind: Literal["passed", "failed", "unconfirmed"]
    call_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Exclude:
    """The call's samples must not move what routing uses; `reason` is kept with them."""

    call_id: str
    reason: Literal["failed check"] = "failed check"


@dataclass(frozen=True, slots=True)
class Admit:
    """The call's samples were excluded as suspect and count again."""

    call_id: str


CaseEffect = Charge | GiveBack | Mark | Exclude | Admit


def step(case: Case, event: CaseEvent, now: int, rules: GuardRules) -> tuple[Case, tuple[CaseEffect, ...]]:
    """One step of a case. A closed case stays as it is, whatever comes."""
    if case.closed:
        return case, ()
    match event:
        case Started():
            return replace(case, state="checking", attempts=case.attempts + 1), ()
        case Checked(verdict, nodes) if verdict.passed:
            return _confirmed(case, nodes, now)
        case Checked(verdict, _):
            return _refuted(case, verdict, now)
        case Interrupted(why):
            if case.attempts >= rules.max_attempts:
                return _unchecked(case, f"{case.attempts} checks were interrupted, the last: {why}", now)
            return replace(case, state="waiting"), ()
        case Impossible(why):
            return _unchecked(case, why, now)
        case Tick():
            if now - case.opened_at >= rules.check_ms:
                return _unchecked(case, f"no check within {rules.check_ms // 1000} s", now)
            return case, ()


def _confirmed(case: Case, nodes: tuple[str, ...], now: int) -> tuple[Case, tuple[CaseEffect, ...]]:
    passed = Mark(tuple(dict.fromkeys((*case.route, *nodes))), "passed", case.call_id, "confirmed")
    effects: tuple[CaseEffect, ...] = (passed,)
    if case.cause == "suspect":
        effects = (Charge(case.call_id), Admit(case.call_id), passed)
    return replace(case, state="confirmed", closed_at=now), effects


def _refuted(case: Case, verdict: Verdict, now: int) -> tuple[Case, tuple[CaseEffect, ...]]:
    why = f"not confirmed by another route: {verdict.reason}"
    return replace(case, state="refuted", closed_at=now, reason=f"{case.reason}; {why}"), (
        GiveBack(case.call_id, why),
        Mark(case.route, "failed", case.call_id, why),
        Exclude(case.call_id),
    )


def _unchecked(case: Case, why: str, now: int) -> tuple[Case, tuple[CaseEffect, ...]]:
    closed = replace(case, state="unchecked", closed_at=now, reason=f"{case.reason}; {why}")
    if case.cause == "audit":
        # The call was charged in good faith and nothing speaks against it.
        return closed, ()
    return closed, (
        GiveBack(case.call_id, f"suspect, and not checked: {why}"),
        Mark(case.route, "unconfirmed", case.call_id, why),
    )
