"""Call statistics that broken routes cannot skew: rolling, per (node, model) and per route. Pure.

Every call leaves a sample. Samples of calls that produced fewer than MIN_OUTPUT_TOKENS, were cancelled,
failed or rerouted, or are suspect, are kept and shown with that reason, and never move a figure that routing
uses: a broken pipeline that ends after one token looks absurdly fast, and an average that counted it would
send it the next call.

Speeds are sums of tokens over sums of time, so long calls weigh more than short ones; times to first token
and trips are medians.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal, TypeVar

from meshnet.routing import NodeTimes
from meshnet.tracker.books.records import Outcome

WINDOW_MS: Final = 30 * 60_000
MIN_OUTPUT_TOKENS: Final = 8
ENOUGH_SAMPLES: Final = 3
FIGURES_MS: Final = 1_000
MAX_SAMPLES: Final = 512
MAX_SERIES: Final = 4_096
MAX_INDEXED: Final = 20_000

Reason = Literal["failed", "cancelled", "rerouted", "suspect", "failed check", "too few tokens"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage of a call took: computing time over all its steps, and the trip to the next stage.

    `prefill_ms` and `decode_ms` are sums over the call; `link_ms` is the mean of one trip, None when unknown.
    """

    node_id: str
    start_layer: int
    end_layer: int
    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    link_ms: float | None = None

    @property
    def layers(self) -> int:
        return self.end_layer - self.start_layer + 1


@dataclass(frozen=True, slots=True)
class CallSample:
    """One finished call.

    `ttft_ms` is from acceptance to the first token, `generation_ms` from the first to the last;
    `failed_nodes` are nodes that failed in it, also where others took over.
    """

    call_id: str
    model: str
    at: int
    outcome: Outcome
    stages: tuple[StageTimes, ...]
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    generation_ms: float
    rerouted: bool = False
    suspect: bool = False
    failed_nodes: tuple[str, ...] = ()


def exclusion(sample: CallSample, min_output_tokens: int = MIN_OUTPUT_TOKENS) -> Reason | None:
    """Why a sample must not move what routing uses; None when it may."""
    if sample.outcome == "failed":
        return "failed"
    if sample.outcome == "cancelled":
        return "cancelled"
    if sample.rerouted:
        return "rerouted"
    if sample.suspect:
        return "suspect"
    if sample.output_tokens < min_output_tokens:
        return "too few tokens"
    return None


@dataclass(slots=True)
class _Point:
    """One call's part in a series. `own` is the reason apart from suspicion, `excluded` the one in force."""

    at: int
    own: Reason | None
    excluded: Reason | None
    success: bool | None
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    prefill_units: int = 0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    decode_units: int = 0
    ttft_ms: float | None = None
    link_ms: float | None = None


class _Series:
    """The samples of one node and model, or of one route, with the figures as last asked for."""

    __slots__ = ("figures", "figures_at", "points")

    def __init__(self) -> None:
        self.points: deque[_Point] = deque(maxlen=MAX_SAMPLES)
        self.figures: Figures | None = None
        self.figures_at = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a series says. Figures without a sample that counts are None.

    samples                     samples that count
    excluded                    samples that do not, by reason
    decode_ms_per_layer         milliseconds of one layer for one token (nodes only)
    prefill_ms_per_token_layer  the same in prefill (nodes only)
    success_rate                of the calls that ended in success or failure, also those that do not count
    """

    samples: int
    excluded: dict[str, int]
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    decode_ms_per_layer: float | None
    prefill_ms_per_token_layer: float | None
    ttft_ms: float | None
    link_ms: float | None
    success_rate: float | None


EMPTY: Final = Figures(0, {}, None, None, None, None, None, None, None)

K = TypeVar("K")
NodeKey = tuple[str, str]
RouteKey = tuple[str, tuple[tuple[str, int, int], ...]]


@dataclass(frozen=True, slots=True)
class NodeView:
    """The figures of one node and model."""

    node_id: str
    model: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class RouteView:
    """The figures of one route of a model; `stages` are (node, first layer, last layer)."""

    model: str
    stages: tuple[tuple[str, int, int], ...]
    figures: Figures


class Statistics:
    """All series, bounded: MAX_SERIES of each kind (the longest unused go) with MAX_SAMPLES samples each."""

    def __init__(self, *, window_ms: int = WINDOW_MS, min_output_tokens: int = MIN_OUTPUT_TOKENS) -> None:
        self.window_ms = window_ms
        self.min_output_tokens = min_output_tokens
        self._nodes: OrderedDict[NodeKey, _Series] = OrderedDict()
        self._routes: OrderedDict[RouteKey, _Series] = OrderedDict()
        self._by_call: OrderedDict[str, list[tuple[_Series, _Point]]] = OrderedDict()

    def record(self, sample: CallSample) -> Reason | None:
        """Takes one finished call; returns why its samples do not count, if so."""
        reason = exclusion(sample, self.min_output_tokens)
        own = exclusion(replace(sample, suspect=False), self.min_output_tokens)
        model = sample.model.lower()
        entered: list[tuple[_Series, _Point]] = []
        done = None if sample.outcome == "cancelled" else sample.outcome == "complete"
        for node_id in dict.fromkeys([*(s.node_id for s in sample.stages), *sample.failed_nodes]):
            stages = [stage for stage in sample.stages if stage.node_id == node_id]
            # A call that failed says nothing about the nodes that did not fail in it.
            success = False if node_id in sample.failed_nodes else (done or None)
            point = _Point(sample.at, own, reason, success, **_sums(stages))
            entered.append((_series(self._nodes, (node_id, model)), point))
        if sample.stages:
            route = tuple((s.node_id, s.start_layer, s.end_layer) for s in sample.stages)
            point = _Point(sample.at, own, reason, done, **_whole(sample))
            entered.append((_series(self._routes, (model, route)), point))
        for series, point in entered:
            series.points.append(point)
            series.figures = None
        self._by_call[sample.call_id] = entered
        if len(self._by_call) > MAX_INDEXED:
            self._by_call.popitem(last=False)
        return reason

    def exclude(self, call_id: str, reason: Reason) -> None:
        """Takes back a call's samples: they are kept, with the reason, and no longer count."""
        for series, point in self._by_call.get(call_id, ()):
            point.excluded = reason
            series.figures = None

    def admit(self, call_id: str) -> None:
        """A suspect call was confirmed: its samples count, unless another reason speaks against them."""
        for series, point in self._by_call.get(call_id, ()):
            point.excluded = point.own
            series.figures = None

    def node(self, node_id: str, model: str, now: int) -> Figures:
        """The figures of a node for a model at `now`."""
        return _figures(self._nodes.get((node_id, model.lower())), now, self.window_ms)

    def route(self, model: str, stages: Iterable[tuple[str, int, int]], now: int) -> Figures:
        """The figures of a route at `now`."""
        return _figures(self._routes.get((model.lower(), tuple(stages))), now, self.window_ms)

    def nodes(self, now: int) -> list[NodeView]:
        """All nodes and models with a sample in the window."""
        views = [
            NodeView(node_id, model, _figures(series, now, self.window_ms))
            for (node_id, model), series in sorted(self._nodes.items())
        ]
        return [view for view in views if view.figures.samples or view.figures.excluded]

    def routes(self, now: int) -> list[RouteView]:
        """All routes with a sample in the window."""
        views = [
            RouteView(model, stages, _figures(series, now, self.window_ms))
            for (model, stages), series in sorted(self._routes.items())
        ]
        return [view for view in views if view.figures.samples or view.figures.excluded]


def _figures(series: _Series | None, now: int, window_ms: int) -> Figures:
    """The figures of a series, kept for FIGURES_MS: routing asks for those of every node at every call."""
    if series is None:
        return EMPTY
    if series.figures is not None and 0 <= now - series.figures_at < FIGURES_MS:
        return series.figures
    current = [point for point in series.points if now - point.at < window_ms]
    counted = [point for point in current if point.excluded is None]
    excluded = Counter(str(point.excluded) for point in current if point.excluded is not None)
    ended = [point.success for point in current if point.success is not None]
    decode = [point for point in counted if point.decode_tokens and point.decode_ms > 0]
    prefill = [point for point in counted if point.prefill_tokens and point.prefill_ms > 0]
    decode_ms, prefill_ms = sum(p.decode_ms for p in decode), sum(p.prefill_ms for p in prefill)
    decode_units, prefill_units = sum(p.decode_units for p in decode), sum(p.prefill_units for p in prefill)
    series.figures = Figures(
        samples=len(counted),
        excluded=dict(sorted(excluded.items())),
        decode_tokens_per_s=1000 * sum(p.decode_tokens for p in decode) / decode_ms if decode else None,
        prefill_tokens_per_s=1000 * sum(p.prefill_tokens for p in prefill) / prefill_ms if prefill else None,
        decode_ms_per_layer=decode_ms / decode_units if decode_units else None,
        prefill_ms_per_token_layer=prefill_ms / prefill_units if prefill_units else None,
        ttft_ms=_median(point.ttft_ms for point in counted),
        link_ms=_median(point.link_ms for point in counted),
        success_rate=sum(ended) / len(ended) if ended else None,
    )
    series.figures_at = now
    return series.figures


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _sums(stages: Sequence[StageTimes]) -> dict[str, Any]:
    """One node's part in a call. Its tokens count once, however many stages of the call it ran."""
    links = [stage.link_ms for stage in stages if stage.link_ms is not None]
    return {
        "prefill_tokens": max((stage.prefill_tokens for stage in stages), default=0),
        "prefill_ms": sum(stage.prefill_ms for stage in stages),
        "prefill_units": sum(stage.prefill_tokens * stage.layers for stage in stages),
        "decode_tokens": max((stage.decode_tokens for stage in stages), default=0),
        "decode_ms": sum(stage.decode_ms for stage in stages),
        "decode_units": sum(stage.decode_tokens * stage.layers for stage in stages),
        "link_ms": sum(links) / len(links) if links else None,
    }


def _whole(sample: CallSample) -> dict[str, Any]:
    """What the client saw of a call.

    Tokens after the first by the time since then, the prompt by the TTFT.
    """
    links = [stage.link_ms for stage in sample.stages if stage.link_ms is not None]
    return {
        "prefill_tokens": sample.prompt_tokens,
        "prefill_ms": sample.ttft_ms or 0.0,
        "decode_tokens": max(sample.output_tokens - 1, 0),
        "decode_ms": sample.generation_ms,
        "ttft_ms": sample.ttft_ms,
        "link_ms": sum(links) if links else None,
    }


def _series(table: OrderedDict[K, _Series], key: K) -> _Series:
    found = table.setdefault(key, _Series())
    table.move_to_end(key)
    if len(table) > MAX_SERIES:
        table.popitem(last=False)
    return found


def observed(times: NodeTimes, figures: Figures) -> NodeTimes:
    """A node's times as routing should take them: its own measurements, or what its calls showed, if slower.

    A node's claims are believed as far as its calls bear them out, once ENOUGH_SAMPLES of them count.
    """
    if figures.samples < ENOUGH_SAMPLES:
        return times
    return replace(
        times,
        decode_ms_per_layer=max(times.decode_ms_per_layer, figures.decode_ms_per_layer or 0.0),
        prefill_ms_per_token_layer=max(
            times.prefill_ms_per_token_layer, figures.prefill_ms_per_token_layer or 0.0
        ),
    )
