"""What is told about calls: live table, console, event stream, log lines, metrics. Never any text."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client import Histogram

from meshnet.routing import Stage
from meshnet.tracker.calls import End
from meshnet.tracker.console import Console, Entry
from meshnet.tracker.feed import ADMINS, CALL_INTERVAL_S, Audience, Feed
from meshnet.tracker.live import LiveCall, LiveTable
from meshnet.tracker.metrics import Metrics
from meshnet.tracker.planning import route_text
from meshnet.tracker.roster import Roster
from meshnet.tracker.tracing import Tracing

LINE_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.25
TELL_DELAY_S = 0.05
"""Console and log are told so much later, several at once: no call waits for that on its way."""

log = structlog.get_logger("meshnet.calls")


@dataclass(slots=True)
class _Trace:
    """What was last said of one call."""

    progress_seq: int | None = None
    progress_at: float = 0.0
    logged_at: float = -LINE_INTERVAL_S
    due: tuple[str, str] | None = None
    timer: asyncio.TimerHandle | None = None


class Recorder:
    """One per tracker. Every method is called from the event loop and returns at once."""

    def __init__(
        self, table: LiveTable, console: Console, feed: Feed, metrics: Metrics, roster: Roster
    ) -> None:
        self.table = table
        self.console = console
        self.feed = feed
        self.metrics = metrics
        self._roster = roster
        self.tracing: Tracing | None = None
        self._gaps: dict[str, Histogram] = {}
        self._traces: dict[str, _Trace] = {}
        self._untold: list[tuple[LiveCall, str, str, str, dict[str, Any]]] = []
        self._lines: list[tuple[str, str, str, str]] = []
        self._telling: asyncio.TimerHandle | None = None
        console.on_entry(self._entry)

    # ------------------------------------------------------------ a call's life

    def accepted(self, call: LiveCall) -> None:
        self.table.add(call)
        self._traces[call.call_id] = _Trace()
        call.note("accepted")
        self.changed(call)

    def queued(self, call: LiveCall, position: int | None) -> None:
        call.queue_position = position
        if call.timeline[-1].event != "queued":
            call.note("queued", position=position)
        self.changed(call)

    def route_selected(self, call: LiveCall, reason: str, endpoints: dict[str, str]) -> None:
        """`endpoints`: gRPC address by node id."""
        if call.queue_position is not None:
            self.metrics.queued.labels(call.model).observe(time.monotonic() - call.accepted_at)
        call.queue_position = None
        downstream = [
            {"endpoint": endpoints[stage.node_id], "start_layer": stage.start_layer}
            for stage in call.stages[1:]
        ]
        stages = [_plain(stage, self._roster.name_of(stage.node_id)) for stage in call.stages]
        call.note("route_selected", stages=stages, downstream=downstream, why=reason)
        hops = "".join(
            f" downstream start_layer={hop['start_layer']} at {hop['endpoint']}" for hop in downstream
        )
        line = f"proxy route selected {call.call_id} {call.model} {self.route(call.stages)}{hops}"
        self._say(call, "proxy route selected", line, stages=stages, downstream=downstream, model=call.model)

    def connected(self, call: LiveCall) -> None:
        head = self._roster.name_of(call.stages[0].node_id)
        call.note("connected", head=head)
        self._say(call, "proxy connected", f"proxy connected {call.call_id} to {head}")

    def progress(self, call: LiveCall, now: float, *, force: bool = False) -> None:
        """Tokens or prefill came in; throttled here, so that callers need not count."""
        trace = self._traces.get(call.call_id)
        if trace is None or (now - trace.progress_at < PROGRESS_INTERVAL_S and not force):
            return
        trace.progress_at = now
        self._tell()
        self.changed(call)
        line = _progress_line(call)
        fields: dict[str, Any] = {
            "output_tokens": call.output_tokens,
            "tokens_per_second": round(call.tokens_per_second, 2),
            "prefill_done": call.prefill_done,
            "prompt_tokens": call.prompt_tokens,
        }
        if trace.progress_seq is None or not self.console.update(trace.progress_seq, line, **fields):
            trace.progress_seq = self.console.add("proxy progress", line, call_id=call.call_id, **fields)
        self._log(call, trace, "proxy progress", line)

    def gap(self, call: LiveCall, seconds: float) -> None:
        series = self._gaps.get(call.model)
        if series is None:
            series = self._gaps[call.model] = self.metrics.gap.labels(call.model)
        series.observe(seconds)

    def first_token(self, call: LiveCall) -> None:
        assert call.first_token_at is not None
        self.metrics.ttft.labels(call.model).observe(call.first_token_at - call.accepted_at)
        call.note("first_token")

    def rerouted(self, call: LiveCall, before: tuple[Stage, ...], failed: str, why: str, reason: str) -> None:
        self.metrics.reroutes.labels(call.model).inc()
        old, new = self.route(before), self.route(call.stages)
        name = self._roster.name_of(failed)
        call.note("rerouted", failed=failed, why=why, before=old, after=new, decision=reason)
        line = f"proxy rerouted {call.call_id} {old} -> {new} because of {name}: {why}"
        self._say(call, "proxy rerouted", line, level="warning", failed=failed, before=old, after=new)

    def ended(self, call: LiveCall, end: End) -> None:
        now = time.monotonic()
        call.ended_at = now
        call.ended_ms = time.time_ns() // 1_000_000
        call.queue_position = None
        if end.outcome != "complete":
            call.error = {"code": end.code, "message": end.message}
        stages = call.view(self._roster.name_of)["stages"]
        detail: dict[str, Any] = {"stages": stages, "output_tokens": call.output_tokens}
        if end.code:
            detail |= {"code": end.code, "message": end.message}
        call.note(end.outcome, **detail)
        for dropped in self.table.end(call):
            self.feed.remove("call", dropped.call_id, Audience(dropped.key_id))
        self._count(call, end)
        if self.tracing is not None:
            self.tracing.ended(call, end)
        why = f" {end.code}: {end.message}" if end.code else ""
        line = (
            f"proxy {end.outcome} {call.call_id} {call.output_tokens} tokens in "
            f"{now - call.accepted_at:.2f} s{why}"
        )
        level = "warning" if end.outcome == "failed" else "info"
        fields = (
            {"output_tokens": call.output_tokens, "code": end.code}
            if end.code
            else {"output_tokens": call.output_tokens}
        )
        self._say(call, f"proxy {end.outcome}", line, level=level, **fields)
        self._tell()
        trace = self._traces.pop(call.call_id)
        if trace.due is None and trace.timer is not None:
            trace.timer.cancel()

    def changed(self, call: LiveCall) -> None:
        if self.feed.watched:
            self.feed.touch("call", call.call_id, CALL_INTERVAL_S, lambda: self._view(call))

    def route(self, stages: tuple[Stage, ...]) -> str:
        return route_text(stages, self._roster.name_of)

    # ------------------------------------------------------------ where it goes

    def _view(self, call: LiveCall) -> tuple[Any, Audience]:
        return call.view(self._roster.name_of), Audience(call.key_id)

    def audience_of(self, entry: Entry) -> Audience:
        """Console entries about a call are for whoever may see the call; the others are for admins."""
        call_id = entry.get("call_id")
        call = self.table.get(call_id) if call_id is not None else None
        return ADMINS if call is None else Audience(call.key_id)

    def _entry(self, entry: Entry) -> None:
        if self.feed.watched:
            self.feed.upsert("console", entry, self.audience_of(entry))

    def _say(self, call: LiveCall, event: str, line: str, *, level: str = "info", **fields: Any) -> None:
        self._untold.append((call, event, line, level, fields))
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_DELAY_S, self.tell)

    def tell(self) -> None:
        """Tells what waits; for who stops the loop before its time has come."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._tell()
        lines, self._lines = self._lines, []
        for event, call_id, request_id, line in lines:
            log.info(event, call_id=call_id, request_id=request_id, line=line)

    def _tell(self) -> None:
        """Brings the console up to date."""
        untold, self._untold = self._untold, []
        for call, event, line, level, fields in untold:
            self.console.add(event, line, level=level, call_id=call.call_id, **fields)
            self.changed(call)
            trace = self._traces.get(call.call_id)
            if trace is not None:
                self._log(call, trace, event, line)

    def _log(self, call: LiveCall, trace: _Trace, event: str, line: str) -> None:
        """At most one line a second per call: what comes earlier waits, and the last of it is said."""
        now = time.monotonic()
        if trace.timer is None and now - trace.logged_at >= LINE_INTERVAL_S:
            trace.logged_at = now
            self._write_soon(call, event, line)
            return
        trace.due = (event, line)
        if trace.timer is None:
            wait = trace.logged_at + LINE_INTERVAL_S - now
            trace.timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._log_due, call, trace)

    def _log_due(self, call: LiveCall, trace: _Trace) -> None:
        trace.timer = None
        if trace.due is not None:
            (event, line), trace.due = trace.due, None
            trace.logged_at = time.monotonic()
            self._write_soon(call, event, line)

    def _write_soon(self, call: LiveCall, event: str, line: str) -> None:
        self._lines.append((event, call.call_id, call.request_id, line))
        self._tell_soon()

    def _count(self, call: LiveCall, end: End) -> None:
        metrics = self.metrics
        metrics.calls.labels(call.model, end.outcome).inc()
        metrics.tokens.labels(call.model, "prompt").inc(call.prompt_tokens)
        metrics.tokens.labels(call.model, "output").inc(call.output_tokens)
        for times in call.stage_times:
            if times.steps and len(call.stage_times) > 1:
                metrics.stage_link.labels(self._roster.name_of(times.node_id)).observe(
                    times.link_ms / times.steps / 1000
                )


def _plain(stage: Stage, name: str) -> dict[str, Any]:
    return {
        "node_id": stage.node_id,
        "name": name,
        "start_layer": stage.start_layer,
        "end_layer": stage.end_layer,
    }


def _progress_line(call: LiveCall) -> str:
    if call.output_tokens == 0:
        return f"proxy progress {call.call_id} prefill {call.prefill_done}/{call.prompt_tokens}"
    return f"proxy progress {call.call_id} {call.output_tokens} tokens {call.tokens_per_second:.1f} tokens/s"
