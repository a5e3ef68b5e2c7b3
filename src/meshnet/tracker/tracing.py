"""OpenTelemetry spans of calls and their stages, an extra: `pip install 'meshnet[otel]'`.

On when OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set and the packages are there. Spans are made
when a call has ended, from what was measured, so that a running call pays nothing. No prompts or answers are
in them.
"""

from __future__ import annotations

import os
import time
from typing import Any

import structlog

from meshnet.tracker.calls import End
from meshnet.tracker.live import LiveCall
from meshnet.tracker.roster import Roster

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = structlog.get_logger("meshnet.tracing")


class Tracing:
    """Hands ended calls to an OpenTelemetry tracer."""

    def __init__(self, provider: Any, roster: Roster) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("meshnet.tracker")
        self._roster = roster

    def ended(self, call: LiveCall, end: End) -> None:
        """One span for the call, one for each stage within it, times in unix nanoseconds."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        offset = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return int(moment * 1e9) + offset

        finished = at(call.ended_at if call.ended_at is not None else time.monotonic())
        span = self._tracer.start_span(
            "meshnet.call", start_time=at(call.accepted_at), attributes=_attributes(call)
        )
        for moment in call.timeline:
            span.add_event(moment.event, timestamp=at(moment.at))
        if end.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR, end.code))
        begun = next((at(m.at) for m in call.timeline if m.event == "route_selected"), at(call.accepted_at))
        context = set_span_in_context(span)
        for times in call.stage_times:
            stage = self._tracer.start_span(
                f"stage {times.start_layer}-{times.end_layer}",
                context=context,
                start_time=begun,
                attributes={
                    "meshnet.node_id": times.node_id,
                    "meshnet.node": self._roster.name_of(times.node_id),
                    "meshnet.start_layer": times.start_layer,
                    "meshnet.end_layer": times.end_layer,
                    "meshnet.compute_ms": times.compute_ms,
                    "meshnet.queue_ms": times.queue_ms,
                    "meshnet.link_ms": times.link_ms,
                    "meshnet.steps": times.steps,
                },
            )
            stage.end(finished)
        span.end(finished)

    def stop(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()


def _attributes(call: LiveCall) -> dict[str, Any]:
    return {
        "meshnet.call_id": call.call_id,
        "meshnet.request_id": call.request_id,
        "meshnet.model": call.model,
        "meshnet.phase": call.phase,
        "meshnet.prompt_tokens": call.prompt_tokens,
        "meshnet.output_tokens": call.output_tokens,
        "meshnet.reroutes": call.reroutes,
        "meshnet.stream": call.stream,
    }


def start_tracing(roster: Roster) -> Tracing | None:
    """Tracing as the environment asks for it; None when it does not, or the packages are missing."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("an OTLP endpoint is set, but the packages are missing: pip install 'meshnet[otel]'")
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "meshnet-tracker"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, roster)
