"""The guard's decisions, and what they do to money, samples and trust."""

from __future__ import annotations

import math

import pytest
from books.kit import START, Kit, usage
from books.test_statistics import MODEL, sample

from meshnet.tracker.books import BooksError, Reservation, Usage, Work
from meshnet.tracker.books.guard import (
    Admit,
    Case,
    Charge,
    Checked,
    Exclude,
    GiveBack,
    GuardRules,
    Impossible,
    Interrupted,
    Mark,
    Started,
    Tick,
    TokenCheck,
    Verdict,
    compare,
    picked_for_audit,
    step,
    suspicion,
)

RULES = GuardRules()
SUSPECT = Case("c1", "suspect", MODEL, ("alpha", "beta"), "ended by itself", START)
AUDIT = Case("c1", "audit", MODEL, ("alpha", "beta"), "drawn", START)
PASSED = Checked(Verdict(True, 0.3, 1, "confirmed"), ("whole",))
FAILED = Checked(Verdict(False, 9.1, 0, "token 0 lies 9.10 below the maximum"), ("whole",))


@pytest.mark.parametrize(
    ("tokens", "ended_by", "nodes", "suspect"),
    [
        (0, "eos", 2, True),
        (3, "eos", 2, True),
        (4, "eos", 2, False),
        (1, "eos", 1, False),
        (1, "stop", 2, False),
        (1, "grammar", 2, False),
        (1, "limit", 2, False),
        (1, "cancel", 2, False),
    ],
)
def test_what_is_suspect(tokens: int, ended_by: str, nodes: int, suspect: bool) -> None:
    assert (suspicion(tokens, ended_by, nodes, RULES) is not None) == suspect  # type: ignore[arg-type]


def test_thresholds_can_be_set() -> None:
    rules = GuardRules.from_dict({"min_tokens": 10, "audit_ppm": 500_000})
    assert suspicion(9, "eos", 2, rules) is not None
    assert rules.max_gap == 1.5
    for bad in ({"min_tokens": -1}, {"max_gap": "1"}, {"audit_ppm": True}, {"other": 1}, {"min_tokens": 1.5}):
        with pytest.raises(BooksError, match=next(iter(bad))):
            GuardRules.from_dict(bad)


async def test_a_setting_that_cannot_be_read_does_not_keep_calls_from_ending(kit: Kit) -> None:
    await kit.books.settings.put("guard", {"min_tokens": 2})
    assert (await kit.books.cases.rules()).min_tokens == 2
    for bad in ({"min_tokens": "many"}, [1], "x"):
        await kit.books.settings.put("guard", bad)
        assert await kit.books.cases.rules() == GuardRules()


def test_a_share_of_calls_is_audited_the_same_everywhere() -> None:
    drawn = [picked_for_audit(f"call-{number}", RULES) for number in range(20_000)]
    assert drawn == [picked_for_audit(f"call-{number}", RULES) for number in range(20_000)]
    assert 140 <= sum(drawn) <= 260
    assert not any(picked_for_audit(f"{n}", GuardRules(audit_ppm=0)) for n in range(1_000))
    assert all(picked_for_audit(f"{n}", GuardRules(audit_ppm=1_000_000)) for n in range(1_000))


def tokens(*gaps: float, drawn: int = 1, kept: bool = True) -> list[TokenCheck]:
    return [TokenCheck(1, 10.0 - gap, 10.0, drawn, kept) for gap in gaps]


@pytest.mark.parametrize(
    ("checks", "greedy", "same_class", "passed"),
    [
        (tokens(0.0, 1.5, 0.2), True, False, True),
        (tokens(0.0, 1.51), True, False, False),
        (tokens(0.9, drawn=2), True, False, True),
        (tokens(0.9, drawn=2), True, True, False),
        (tokens(0.0), True, True, True),
        (tokens(5.0), False, False, True),
        (tokens(0.1, kept=False), False, False, False),
        (tokens(5.0, drawn=2), False, True, False),
        ([], True, False, False),
        (tokens(math.nan), True, False, False),
        (tokens(-1.0), True, False, False),
    ],
)
def test_when_a_check_confirms(
    checks: list[TokenCheck], greedy: bool, same_class: bool, passed: bool
) -> None:
    verdict = compare(checks, produced=len(checks), greedy=greedy, same_class=same_class, rules=RULES)
    assert verdict.passed == passed, verdict


def test_a_check_that_did_not_see_every_token_confirms_nothing() -> None:
    verdict = compare(tokens(0.0), produced=2, greedy=True, same_class=False, rules=RULES)
    assert (verdict.passed, verdict.reason) == (False, "the check saw 1 of 2 tokens")


def test_the_worst_token_is_named() -> None:
    verdict = compare(tokens(0.1, 4.0, 2.0), produced=3, greedy=True, same_class=False, rules=RULES)
    assert verdict.at == 1
    assert verdict.worst_gap == pytest.approx(4.0)


def test_a_confirmed_suspect_is_charged_and_its_nodes_earn_trust() -> None:
    checking, effects = step(SUSPECT, Started(), START, RULES)
    assert (checking.state, checking.attempts, effects) == ("checking", 1, ())
    closed, effects = step(checking, PASSED, START + 5, RULES)
    assert (closed.state, closed.closed_at) == ("confirmed", START + 5)
    assert effects == (
        Charge("c1"),
        Admit("c1"),
        Mark(("alpha", "beta", "whole"), "passed", "c1", "confirmed"),
    )


def test_a_suspect_that_is_not_confirmed_is_given_back_and_its_nodes_are_marked() -> None:
    closed, effects = step(SUSPECT, FAILED, START, RULES)
    assert closed.state == "refuted"
    assert [type(effect) for effect in effects] == [GiveBack, Mark, Exclude]
    mark = effects[1]
    assert isinstance(mark, Mark)
    assert (mark.nodes, mark.kind) == (("alpha", "beta"), "failed")


def test_an_audit_refunds_what_it_does_not_confirm_and_lets_the_rest_be() -> None:
    assert [type(e) for e in step(AUDIT, FAILED, START, RULES)[1]] == [GiveBack, Mark, Exclude]
    assert [type(e) for e in step(AUDIT, PASSED, START, RULES)[1]] == [Mark]
    closed, effects = step(AUDIT, Impossible("no other route"), START, RULES)
    assert (closed.state, effects) == ("unchecked", ())


def test_without_a_check_a_suspect_is_released() -> None:
    assert step(SUSPECT, Tick(), START + RULES.check_ms - 1, RULES) == (SUSPECT, ())
    for event, now in ((Tick(), START + RULES.check_ms), (Impossible("no other route"), START)):
        closed, effects = step(SUSPECT, event, now, RULES)
        assert closed.state == "unchecked"
        assert [type(effect) for effect in effects] == [GiveBack, Mark]


def test_interrupted_checks_run_again_a_few_times() -> None:
    case = SUSPECT
    for attempt in range(RULES.max_attempts):
        case, _ = step(case, Started(), START, RULES)
        case, effects = step(case, Interrupted("a node left"), START, RULES)
        assert case.closed == (attempt == RULES.max_attempts - 1)
    assert [type(effect) for effect in effects] == [GiveBack, Mark]


def test_a_closed_case_stays_closed() -> None:
    closed, _ = step(SUSPECT, PASSED, START, RULES)
    for event in (Started(), PASSED, FAILED, Interrupted("x"), Impossible("x"), Tick()):
        assert step(closed, event, START + 10**9, RULES) == (closed, ())


# ---------------------------------------------------------------- in the books


async def suspect_call(kit: Kit, call_id: str = "c1", model: str = "paid") -> None:
    """A call over two nodes that ended by itself after two tokens."""
    answer = await kit.books.reserve(call_id, kit.small, model, 100, 50)
    assert isinstance(answer, Reservation)
    await kit.books.hold(call_id, usage(100, 2))
    await kit.books.open_case(
        Case(call_id, "suspect", model, ("alpha", "beta"), "ended by itself after 2 tokens", kit.clock())
    )
    kit.books.record(sample(call_id, ("alpha", "beta"), output=2, suspect=True))


async def test_a_confirmed_suspect_pays_once(kit: Kit) -> None:
    await suspect_call(kit)
    await suspect_call_again(kit)
    assert (await kit.books.accounts.get("small")).held == 200
    case = await kit.books.advance("c1", Started())
    assert case.state == "checking"
    case = await kit.books.advance("c1", PASSED)
    assert case.state == "confirmed"
    assert (await kit.books.advance("c1", FAILED)).state == "confirmed"
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (1_000 - 104, 0)
    ((shown, checks),) = await kit.books.cases.latest()
    assert shown == case
    assert [(check.nodes, check.passed, check.worst_gap) for check in checks] == [(("whole",), True, 0.3)]
    kinds = [(event.kind, event.node_id) for event in await kit.books.cases.events()]
    assert kinds == [
        ("suspect_opened", None),
        ("suspect", "alpha"),
        ("suspect", "beta"),
        ("suspect_confirmed", None),
        ("passed", "alpha"),
        ("passed", "beta"),
        ("passed", "whole"),
    ]
    assert (await kit.books.reports.check()).ok


async def suspect_call_again(kit: Kit) -> None:
    """Opening a case twice changes nothing."""
    await kit.books.open_case(Case("c1", "suspect", "paid", ("x",), "again", kit.clock()))
    assert (await kit.books.cases.get("c1")).route == ("alpha", "beta")


async def test_a_refuted_suspect_costs_nothing_and_its_nodes_lose_trust_everywhere(kit: Kit) -> None:
    other = await kit.another()
    await suspect_call(kit)
    case = await kit.books.advance("c1", FAILED)
    assert case.state == "refuted"
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (1_000, 0)
    assert sorted(kit.books.trust.distrusted(kit.clock())) == ["alpha", "beta"]
    assert kit.books.statistics.node("alpha", MODEL, kit.clock()).excluded == {"failed check": 1}
    await other.advance("c1", Tick())
    assert other.trust.score("alpha", kit.clock()) == kit.books.trust.score("alpha", kit.clock())
    assert (await kit.books.reports.check()).ok


async def test_a_failed_audit_refunds_the_charge(kit: Kit) -> None:
    await kit.reserve("c1")
    await kit.books.settle("c1", usage(100, 50))
    await kit.books.open_case(Case("c1", "audit", "paid", ("alpha", "beta"), "drawn", kit.clock()))
    await kit.books.advance("c1", FAILED)
    assert (await kit.books.accounts.get("small")).balance == 1_000
    assert await kit.rows("SELECT status FROM calls") == [("refunded",)]
    assert (await kit.books.reports.check()).ok


async def test_suspects_that_nobody_checked_are_released_after_an_hour(kit: Kit) -> None:
    await suspect_call(kit)
    kit.clock.forward(s=3_599)
    assert await kit.books.cases.expire(kit.clock()) == {}
    kit.clock.forward(s=1)
    effects = await kit.books.cases.expire(kit.clock())
    # Housekeeping may have come first; either way the call is released.
    assert list(effects) in (["c1"], [])
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (1_000, 0)
    assert (await kit.books.cases.get("c1")).state == "unchecked"


async def test_a_free_suspect_is_held_and_confirmed_too(kit: Kit) -> None:
    await suspect_call(kit, "c1", "free")
    assert await kit.rows("SELECT status FROM calls") == [("held",)]
    await kit.books.advance("c1", PASSED)
    assert await kit.rows("SELECT status, charge, output_tokens FROM calls") == [("settled", 0, 2)]
    assert (await kit.books.reports.check()).ok


async def test_a_case_that_is_not_known(kit: Kit) -> None:
    with pytest.raises(BooksError, match="neither suspect nor audited"):
        await kit.books.advance("nothing", Tick())


async def test_a_held_call_whose_case_was_never_opened_is_released_too(kit: Kit) -> None:
    await kit.reserve("c1")
    await kit.books.hold("c1", usage(100, 2))
    await suspect_call(kit, "c2")
    kit.clock.forward(s=3_599)
    await kit.books.tidy(kit.clock())
    assert (await kit.books.accounts.get("small")).held == 400
    kit.clock.forward(s=1)
    await kit.books.tidy(kit.clock())
    assert (await kit.books.accounts.get("small")).held == 0
    assert await kit.rows("SELECT id, status FROM calls ORDER BY id") == [
        ("c1", "released"),
        ("c2", "released"),
    ]


async def test_an_open_call_that_this_tracker_does_not_know_is_released(kit: Kit) -> None:
    """Whatever lost it (an end that the books refused, say), its reservation does not stay for ever."""
    await kit.reserve("lost")
    await kit.reserve("live")
    del kit.books._live["lost"]
    await kit.books.tidy(kit.clock())
    assert (await kit.books.accounts.get("small")).held == 400
    kit.clock.forward(s=60)
    await kit.books.tidy(kit.clock())
    assert await kit.rows("SELECT id, status FROM calls ORDER BY id") == [
        ("live", "open"),
        ("lost", "released"),
    ]
    assert (await kit.books.settle("live", usage(100, 10))).charge == 120


async def test_a_usage_that_cannot_be_is_refused_and_the_call_stays_open(kit: Kit) -> None:
    await kit.reserve("c1")
    for wrong in (Usage(-1, 5), Usage(1, 5, (Work("a", -1, 1, 1),)), Usage(10**9, 5)):
        with pytest.raises(ValueError, match="usage"):
            await kit.books.settle("c1", wrong)
    assert (await kit.books.settle("c1", usage(100, 10))).charge == 120
