"""What the steps of one call must be, and which of them can run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshnet.engine.base import EngineError, EngineInfo, Step
from meshnet.engine.numerics import EXACT_ROWS


def groups(steps: Sequence[Step], max_rows: int) -> list[list[int]]:
    """Steps that one llama.cpp call can run as one ubatch: equal rows, consecutive slots, and where there
    are several, few enough rows to stay exact."""
    order = sorted(range(len(steps)), key=lambda i: steps[i].slot)
    groups: list[list[int]] = []
    most = min(max_rows, EXACT_ROWS)
    for i in order:
        group = groups[-1] if groups else []
        fits = (
            group
            and steps[i].slot == steps[group[-1]].slot + 1
            and steps[i].rows == steps[group[-1]].rows
            and (len(group) + 1) * steps[i].rows <= most
        )
        if fits:
            group.append(i)
        else:
            groups.append([i])
    return groups


def joined(arrays: Sequence[Any]) -> Any:
    """One contiguous array of all rows; of a single one, the array itself where it is contiguous."""
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def check_rows(step: Step, entry: int, info: EngineInfo) -> None:
    tokens, hidden = step.tokens, step.hidden
    if (tokens is None) == (hidden is None) or (tokens is None) != (entry > 0):
        wanted = "hidden states" if entry else "tokens"
        raise EngineError(f"slot {step.slot} starts at layer {entry}: it takes {wanted}, and nothing else")
    if tokens is not None:
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
            raise EngineError(
                f"slot {step.slot}: tokens of {tokens.dtype} {tokens.shape}, int32 (n,) with n > 0 are wanted"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= info.n_vocab:
            raise EngineError(f"slot {step.slot}: a token outside the vocabulary of {info.n_vocab}")
    elif hidden is not None:
        if (
            hidden.dtype != np.float32
            or hidden.ndim != 2
            or hidden.shape[1] != info.n_embd
            or not len(hidden)
        ):
            raise EngineError(
                f"slot {step.slot}: hidden states of {hidden.dtype} {hidden.shape}, "
                f"float32 (n, {info.n_embd}) with n > 0 are wanted"
            )
        if not np.isfinite(hidden).all():
            raise EngineError(f"slot {step.slot}: the hidden states hold NaN or infinity")
