"""Structured logs: one line per event, as JSON or for people. Prompts, answers and secrets never get here."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog


def set_up_logs(form: Literal["console", "json"], stream: TextIO) -> None:
    """Sends structlog's events, and warnings of libraries, to `stream`."""
    renderer: Any
    if form == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            # Without the values of local variables: prompts and keys may be among them.
            exception_formatter=structlog.dev.plain_traceback,
        )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if form == "json" else _keep,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def _keep(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    return event
