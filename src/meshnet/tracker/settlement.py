"""How a call's end goes into the books: charge, hold or release; statistics; cases for the guard."""

from __future__ import annotations

import structlog

from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.guard import Case, EndedBy, GuardRules, picked_for_audit, suspicion
from meshnet.tracker.books.records import BooksError, BooksUnavailable, Usage, Work
from meshnet.tracker.checking import Checker, Evidence
from meshnet.tracker.experience import sample_of
from meshnet.tracker.results import Result
from meshnet.tracker.running import Run

_ENDED_BY: dict[str, EndedBy] = {
    "eos": "eos",
    "stop_string": "stop",
    "limit": "limit",
    "context": "limit",
    "grammar": "grammar",
}

log = structlog.get_logger("meshnet.books")


class Settlement:
    """One per tracker."""

    def __init__(self, books: Books, checker: Checker) -> None:
        self._books = books
        self._checker = checker

    async def settle(self, run: Run, result: Result) -> None:
        """Books a call's end exactly once. What the database cannot take now, it is given later."""
        call_id = run.order.call_id
        try:
            rules = await self._books.cases.rules()
            suspect = suspicious_choice(result, rules) if result.end.outcome == "complete" else None
            self._books.record(sample_of(run, result, self._books.clock(), suspect=suspect is not None))
            usage = usage_of(run, result)
            if suspect is not None:
                choice, reason = suspect
                await self._books.hold(call_id, usage, "complete")
                await self._open_case(run, result, "suspect", choice, reason)
                return
            await self._books.settle(call_id, usage, result.end.outcome)
            if result.end.outcome == "complete" and usage.output_tokens and picked_for_audit(call_id, rules):
                await self._open_case(run, result, "audit", 0, "picked for an audit")
        except BooksUnavailable as error:
            log.warning("the books take this call's end later", call_id=call_id, error=error.message)
        except BooksError as error:
            log.error("the books refused a call's end", call_id=call_id, error=error.message)

    async def _open_case(self, run: Run, result: Result, cause: str, choice: int, reason: str) -> None:
        assert result.chosen is not None
        route = tuple(dict.fromkeys(stage.node_id for stage in result.chosen.stages))
        now = self._books.clock()
        case = Case(
            call_id=run.order.call_id,
            cause="suspect" if cause == "suspect" else "audit",
            model=result.model,
            route=route,
            reason=reason,
            opened_at=now,
        )
        await self._books.open_case(case)
        gathered = result.gathered
        ended = gathered.ends[choice]
        last = (ended.token,) if ended.by == "eos" and ended.token >= 0 else ()
        evidence = Evidence(
            order=run.order,
            model=result.model,
            cause=case.cause,
            choice=choice,
            tokens=(*gathered.ids[choice], *last),
            spans=gathered.spans,
            route=route,
            stages=result.chosen.stages,
            numerics=frozenset(result.numerics[node_id] for node_id in route),
            kept_at=now,
        )
        self._checker.put(evidence)


def suspicious_choice(result: Result, rules: GuardRules) -> tuple[int, str] | None:
    """The first choice whose end is suspect, and why."""
    if result.chosen is None:
        return None
    nodes = len({stage.node_id for stage in result.chosen.stages})
    for choice, ended in sorted(result.gathered.ends.items()):
        by = _ENDED_BY.get(ended.by, "error")
        reason = suspicion(len(result.gathered.ids[choice]), by, nodes, rules)
        if reason is not None:
            return choice, reason
    return None


def usage_of(run: Run, result: Result) -> Usage:
    """Measured tokens, and what each node did in each attempt."""
    work = tuple(
        Work(node_id, last - first + 1, times.prefill_tokens, times.decode_tokens)
        for (_, node_id, first, last), times in sorted(result.gathered.work.items())
    )
    return Usage(run.live.prompt_tokens, result.gathered.tokens, work)
