"""What a call's stages have done so far, summed for the tracker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb


@dataclass(slots=True)
class _Sum:
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    link_ms: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class StageSums:
    """By node and layers, in the order in which they first took part."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int, int], _Sum] = {}

    def add(
        self, times: Sequence[pb.StageTime], stages: Sequence[calls.RouteStage], *, drafted: bool = False
    ) -> None:
        """Times of one sampled step, head first, as its route's stages reported them. `drafted`: its rows
        behind the first were drafts."""
        if len(times) != len(stages):
            return  # sent again by a stage that kept it: what ran before it was told with its first sending
        for line, stage in zip(times, stages, strict=True):
            own = self._sums.setdefault((stage.node_id, stage.start_layer, stage.end_layer), _Sum())
            own.compute_ms += line.compute_ms
            own.queue_ms += line.queue_ms
            own.link_ms += line.link_ms * line.steps
            own.steps += line.steps
            if line.rows > 1 and not drafted:
                own.prefill_tokens += line.rows
                own.prefill_ms += line.compute_ms
            else:
                own.decode_tokens += line.rows
                own.decode_ms += line.compute_ms

    def event(self) -> calls.Stages:
        return calls.Stages(
            tuple(
                calls.StageTimes(
                    node_id=node_id,
                    start_layer=start,
                    end_layer=end,
                    compute_ms=own.compute_ms,
                    queue_ms=own.queue_ms,
                    link_ms=own.link_ms,
                    steps=own.steps,
                    prefill_tokens=own.prefill_tokens,
                    decode_tokens=own.decode_tokens,
                    prefill_ms=own.prefill_ms,
                    decode_ms=own.decode_ms,
                )
                for (node_id, start, end), own in self._sums.items()
            )
        )
