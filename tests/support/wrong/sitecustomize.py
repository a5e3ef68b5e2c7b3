"""Makes a real node compute wrongly, when a test puts this folder on its PYTHONPATH.

`MESHNET_TEST_WRONG` names a file. While it holds `flip`, hidden states leave the node with their sign turned;
while it holds `stop`, the node's tail ends every answer after one token, as a pipeline does that lost layers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshnet.engine.base import Step, StepResult
from meshnet.engine.llama import LlamaEngine

MODE = Path(os.environ.get("MESHNET_TEST_WRONG", os.devnull))
END = 2
"""SmolLM2's token `<|im_end|>`."""
honest = LlamaEngine.run


def run(engine: LlamaEngine, steps: Sequence[Step]) -> list[StepResult]:
    """What the engine computes, made wrong."""
    mode = MODE.read_text() if MODE.exists() else ""
    return [_spoiled(mode, step, result) for step, result in zip(steps, honest(engine, steps), strict=True)]


def _spoiled(mode: str, step: Step, result: StepResult) -> StepResult:
    if mode == "flip" and result.hidden is not None:
        return replace(result, hidden=-result.hidden)
    if mode == "stop" and step.rows == 1:
        return replace(result, sampled=tuple(replace(one, token=END, end=True) for one in result.sampled))
    return result


setattr(LlamaEngine, "run", run)  # noqa: B010 - on purpose behind the type checker's back
