"""What the router raises when layers have no holder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshnet.routing.checks import LayerRange


class NoRouteAvailable(Exception):
    """No complete path over the window.

    `model` is the label that was asked for; `window` the layers (first, last), or None when no node is live;
    `blocked_at` the highest layer border that is reachable from the window's start, or None without a window.
    `excluded` says, by node id, why a live node was not considered. `busy` is True when a route would exist
    if every node had room: waiting may help.
    """

    def __init__(
        self,
        model: str,
        window: LayerRange | None,
        blocked_at: int | None = None,
        *,
        excluded: Mapping[str, str] | None = None,
        busy: bool = False,
    ) -> None:
        self.model = model
        self.window = window
        self.blocked_at = blocked_at
        self.excluded = dict(excluded or {})
        self.busy = busy
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        if self.window is None:
            return f"no route for model {self.model!r}: there is no live node that serves it, so no window"
        first, last = self.window
        text = f"no route for model {self.model!r} over layers {first}-{last}"
        if self.blocked_at is not None:
            text += f": nothing goes on from layer {self.blocked_at}"
        if self.busy:
            text += " while nodes are full"
        if self.excluded:
            reasons = [f"{node} {reason}" for node, reason in sorted(self.excluded.items())]
            shown = "; ".join(reasons[:8]) + ("; ..." if len(reasons) > 8 else "")
            text += f" (left out: {shown})"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.model, self.window, self.blocked_at, self.excluded, self.busy)


def _rebuild(
    model: str, window: LayerRange | None, blocked_at: int | None, excluded: Mapping[str, str], busy: bool
) -> NoRouteAvailable:
    return NoRouteAvailable(model, window, blocked_at, excluded=excluded, busy=busy)


class RoutingFailure(Exception):
    """A failover that finds no substitute.

    `layers` are the layers nobody can take over, `model` is the label.
    """

    def __init__(self, model: str, layers: Iterable[int], detail: str = "") -> None:
        self.model = model
        self.layers = tuple(sorted(set(layers)))
        self.detail = detail
        plural = "s" if len(self.layers) > 1 else ""
        text = f"no live node can take over layer{plural} {layer_text(self.layers)} of model {model!r}"
        super().__init__(f"{text}: {detail}" if detail else text)

    def __reduce__(self) -> tuple[object, ...]:
        return RoutingFailure, (self.model, self.layers, self.detail)


def runs(layers: Iterable[int]) -> list[LayerRange]:
    """The layers as ranges without gaps, ascending."""
    result: list[LayerRange] = []
    for layer in sorted(set(layers)):
        if result and result[-1][1] + 1 == layer:
            result[-1] = (result[-1][0], layer)
        else:
            result.append((layer, layer))
    return result


def layer_text(layers: Iterable[int]) -> str:
    """Layers for people: "4-7, 9"."""
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs(layers))
