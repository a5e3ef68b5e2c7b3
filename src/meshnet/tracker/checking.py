"""Carries out the guard's checks: the same prompt and tokens, weighed on another route, in idle time.

What a check needs of a call (prompt, seed, tokens) stays in memory only, bounded, and for an hour at most. A
check never waits for room and gives way to users' calls; suspects go before audits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from meshnet.protocol.calls import CallError, Done, GenerateCall, LostNode, Weighed, WeighedToken
from meshnet.routing import RoutingRequest, Stage
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.guard import (
    CaseEvent,
    Cause,
    Checked,
    Impossible,
    Interrupted,
    Started,
    TokenCheck,
    Verdict,
    compare,
)
from meshnet.tracker.books.records import BooksError
from meshnet.tracker.console import Console
from meshnet.tracker.heads import HeadError, Heads
from meshnet.tracker.jobs import Chosen, Job
from meshnet.tracker.placement import Placement
from meshnet.tracker.reservations import Need
from meshnet.tracker.roster import Roster
from meshnet.tracker.seat import Order
from meshnet.tracker.wireclient import TimeUp

MAX_KEPT = 256
MAX_TOKENS = 1_000_000
POLL_S = 0.25
RETRY_S = 2.0
CHECK_S = 300.0
"""The longest that one check may run."""

log = structlog.get_logger("meshnet.checks")

Sign = Callable[[str, str, int, Chosen], str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A call as it was run, and the tokens of one choice (its end-of-sequence token included)."""

    order: Order = field(repr=False)
    model: str
    cause: Cause
    choice: int
    tokens: tuple[int, ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    route: tuple[str, ...]
    stages: tuple[Stage, ...]
    numerics: frozenset[str]
    kept_at: int

    @property
    def size(self) -> int:
        return self.order.prompt_tokens + len(self.tokens)


class Checker:
    """One check at a time."""

    def __init__(
        self, books: Books, roster: Roster, placement: Placement, heads: Heads, console: Console, sign: Sign
    ) -> None:
        self._books = books
        self._roster = roster
        self._placement = placement
        self._heads = heads
        self._console = console
        self._sign = sign
        self._kept: OrderedDict[str, Evidence] = OrderedDict()
        self._tokens = 0
        self._not_before: dict[str, float] = {}
        self._numbers = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="checks")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def waiting(self) -> int:
        return len(self._kept)

    def put(self, evidence: Evidence) -> None:
        """Keeps what a check needs; when it is too much the oldest goes, and its case with it."""
        self._kept[evidence.order.call_id] = evidence
        self._tokens += evidence.size

    def _drop(self, call_id: str) -> None:
        evidence = self._kept.pop(call_id, None)
        self._not_before.pop(call_id, None)
        if evidence is not None:
            self._tokens -= evidence.size

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._forget()
                evidence = self._next()
                if evidence is not None:
                    await self._check(evidence)
            except BooksError as error:
                log.warning("a check waits for the books", error=error.message)
                await asyncio.sleep(RETRY_S)

    async def _forget(self) -> None:
        """What is too old, or too much, is not kept; its case ends unchecked."""
        rules = await self._books.cases.rules()
        now = self._books.clock()
        while self._kept:
            call_id, oldest = next(iter(self._kept.items()))
            late = now - oldest.kept_at >= rules.check_ms
            if not late and len(self._kept) <= MAX_KEPT and self._tokens <= MAX_TOKENS:
                return
            self._drop(call_id)
            if not late:
                await self._advance(call_id, Impossible("too many calls wait for their checks"))

    def _next(self) -> Evidence | None:
        """The oldest suspect, else the oldest audit, whose time has come."""
        now = asyncio.get_running_loop().time()
        due = [e for call_id, e in self._kept.items() if self._not_before.get(call_id, 0.0) <= now]
        return min(due, key=lambda e: (e.cause != "suspect", e.kept_at), default=None)

    async def _check(self, evidence: Evidence) -> None:
        call_id = evidence.order.call_id
        if not self._other_route_exists(evidence):
            self._drop(call_id)
            await self._advance(call_id, Impossible("the mesh has no other route for its model"))
            return
        self._numbers += 1
        check_id = f"{call_id}-check{self._numbers}"
        chosen = self._place(evidence, check_id)
        if chosen is None:
            self._not_before[call_id] = asyncio.get_running_loop().time() + RETRY_S
            return
        try:
            await self._advance(call_id, Started())
            rows = await self._weigh(evidence, check_id, chosen)
        except (HeadError, TimeUp) as error:
            await self._interrupted(call_id, str(error) or "it took too long")
            return
        finally:
            self._placement.release(check_id)
        verdict = await self._verdict(evidence, chosen, rows)
        self._drop(call_id)
        nodes = tuple(stage.node_id for stage in chosen.stages)
        await self._advance(call_id, Checked(verdict, nodes))
        word = "confirmed" if verdict.passed else "not confirmed"
        line = f"check of {call_id} on {', '.join(map(self._roster.name_of, nodes))}: {word}"
        level = "info" if verdict.passed else "warning"
        self._console.add("check ended", line, level=level, call_id=call_id, passed=verdict.passed)
        log.info("check ended", call_id=call_id, passed=verdict.passed, reason=verdict.reason)

    async def _interrupted(self, call_id: str, why: str) -> None:
        case = await self._advance(call_id, Interrupted(why))
        if case:
            self._drop(call_id)
        else:
            self._not_before[call_id] = asyncio.get_running_loop().time() + RETRY_S

    async def _advance(self, call_id: str, event: CaseEvent) -> bool:
        """Takes the case one step further; True when it is closed."""
        return (await self._books.advance(call_id, event)).closed

    # ------------------------------------------------------------ another route

    def _candidates(self, evidence: Evidence) -> list[dict[str, str]]:
        """Which nodes to leave out, best first: all of the route, then one of them at a time."""
        why = "ran the call that is checked"
        return [dict.fromkeys(evidence.route, why), *({node: why} for node in evidence.route)]

    def _other_route_exists(self, evidence: Evidence) -> bool:
        for view in self._placement.views(evidence.model):
            whole = [s.node_id for s in view.states if (0, view.layers - 1) in s.served_layers]
            if len(evidence.stages) > 1 and whole:
                return True
            for left_out in self._candidates(evidence):
                if self._placement.reachable(view, frozenset(left_out)):
                    return True
        return False

    def _place(self, evidence: Evidence, check_id: str) -> Chosen | None:
        """A different route with room, held; a single node that has all layers where there is one."""
        order = evidence.order
        need = Need(1, order.prompt_tokens + len(evidence.tokens) + 1)
        for left_out in [*self._whole_nodes_only(evidence), *self._candidates(evidence)]:
            chosen = self._placement.take_now(
                Job(
                    call_id=check_id,
                    key="check",
                    model=evidence.model,
                    need=need,
                    request=RoutingRequest(None, order.prompt_tokens, max(1, len(evidence.tokens))),
                    excluded=left_out,
                )
            )
            if chosen is None:
                continue
            if chosen.stages != evidence.stages:
                return chosen
            self._placement.release(check_id)
        return None

    def _whole_nodes_only(self, evidence: Evidence) -> list[dict[str, str]]:
        """For a route of several nodes: everything left out but one node that has all layers."""
        if len(evidence.stages) < 2:
            return []
        found = []
        for view in self._placement.views(evidence.model):
            for state in view.states:
                if (0, view.layers - 1) in state.served_layers:
                    others = (s.node_id for s in view.states if s.node_id != state.node_id)
                    found.append(dict.fromkeys(others, "the check takes a single node"))
        return sorted(
            found, key=lambda left_out: sum(node in left_out for node in evidence.route), reverse=True
        )

    # ------------------------------------------------------------ weighing

    async def _weigh(self, evidence: Evidence, check_id: str, chosen: Chosen) -> list[WeighedToken]:
        """The answer's tokens as another route sees them. Raises HeadError and TimeUp."""
        order = evidence.order
        node = self._roster.state.nodes.get(chosen.stages[0].node_id)
        if node is None or not node.connected:
            raise HeadError(0, "lost", "the head left the mesh")
        request = GenerateCall(
            call_id=check_id,
            epoch=0,
            kind=order.kind,
            model=evidence.model,
            request=order.request,
            ticket=self._sign(check_id, evidence.model, 0, chosen),
            seed=order.seed,
            max_tokens=len(evidence.tokens) + 1,
            prefix_key=f"{order.prefix_key}-check",
            reuse_prefix=False,
            spans=evidence.spans,
            check=evidence.tokens,
            check_choice=evidence.choice,
        )
        rows: list[WeighedToken] = []
        deadline = asyncio.get_running_loop().time() + CHECK_S
        stream = await self._heads.open(node.way, request, deadline)
        try:
            while True:
                if self._placement.waiting:
                    raise HeadError(0, "gave_way", "a user's call needed the room")
                events = await stream.read(deadline)
                if events is None:
                    raise HeadError(0, "ended", "its stream ended")
                for event in events:
                    if isinstance(event, Weighed):
                        rows.extend(event.rows)
                    elif isinstance(event, LostNode | CallError):
                        raise HeadError(0, event.code, event.message)
                    elif isinstance(event, Done):
                        if len(rows) != len(evidence.tokens):
                            # It says nothing of the answer: no verdict may come of it.
                            raise HeadError(0, "not_weighed", "the checking node weighed no tokens")
                        return rows
        finally:
            stream.close()

    async def _verdict(self, evidence: Evidence, chosen: Chosen, rows: list[WeighedToken]) -> Verdict:
        classes = {chosen.view.numerics[stage.node_id] for stage in chosen.stages} | evidence.numerics
        return compare(
            [TokenCheck(row.token, row.logit, row.max_logit, row.drawn, row.kept) for row in rows],
            produced=len(evidence.tokens),
            greedy=evidence.order.request.get("temperature", 1.0) == 0,
            same_class=len(classes) == 1,
            rules=await self._books.cases.rules(),
        )
