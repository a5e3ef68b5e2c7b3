"""What a later call goes on from: only what can be computed again to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from node.bench import LAST, Bench

from meshnet.node.prefixes import whole_spans
from meshnet.protocol import calls

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = [1000 + 7 * number for number in range(300)]
SHORT = LONG[:30]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "prefix_key": "account"}


@pytest.mark.parametrize(
    ("length", "whole"), [(0, 0), (255, 0), (256, 256), (300, 256), (330, 330), (356, 356), (400, 400)]
)
async def test_a_span_that_ran_on_the_other_kernel_counts_as_a_whole(length: int, whole: int) -> None:
    assert whole_spans(((0, 256), (256, 326), (326, 356), (356, 418)), length, 63) == whole


async def test_no_part_of_a_large_chunk_is_gone_on_from(bench: Bench) -> None:
    head, tail = await bench.add(0, 14, n_ctx=512), await bench.add(15, LAST, n_ctx=512)
    fresh = await bench.run([head, tail], SHORT, **{**OPTIONS, "prefix_key": "nobody"})
    await bench.run([head, tail], LONG, **OPTIONS)
    answer = await bench.run([head, tail], SHORT, **OPTIONS)
    assert answer.of(calls.Opened)[0].reused_tokens == 0
    assert answer.ids() == fresh.ids()
    # The next turn goes on from all of the one before.
    again = await bench.run([head, tail], [*SHORT, *answer.ids(), 17, 18], **OPTIONS)
    assert again.of(calls.Opened)[0].reused_tokens >= len(SHORT) + len(answer.ids()) - 1
    await bench.settled()


async def test_stages_go_on_from_the_same_session_or_from_nothing(bench: Bench) -> None:
    """A tail that has kept more than its head, or something else, computes all of the prompt."""
    head, other = await bench.add(0, 14, n_ctx=512), await bench.add(0, 14, n_ctx=512)
    tail = await bench.add(15, LAST, n_ctx=512)
    counters = tail.stages.state.counters
    first = await bench.run([head, tail], SHORT, **OPTIONS)
    second_turn = [*SHORT, *first.ids(), 17, 18]
    before = counters.prefill_tokens
    cold = await bench.run([other, tail], second_turn, **OPTIONS)
    assert cold.of(calls.Opened)[0].reused_tokens == 0
    assert counters.prefill_tokens - before == len(second_turn)
    before = counters.prefill_tokens
    warm = await bench.run([head, tail], second_turn, **OPTIONS)
    reused = warm.of(calls.Opened)[0].reused_tokens
    assert reused >= len(SHORT)
    assert counters.prefill_tokens - before == len(second_turn) - reused
    await bench.settled()
