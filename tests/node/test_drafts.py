"""Drafts: what is guessed, when it is sent, and that it never changes a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from node.bench import LAST, Bench, BenchNode
from node.test_failover import after, rerouting

from meshnet.node.drafts import NEVER, Lookup, Pace, Policy
from meshnet.node.ring import Kept, SentRing
from meshnet.protocol import calls

ALWAYS = Policy(least_share=0.0, least_gain=0.0)
"""Whenever there is a guess."""
VERSE = (
    "The old king walked down to the harbour, looked at the ships, and counted nine of them before the sun "
    "went down. "
)
PROMPT = VERSE * 3 + "The old king"
ON: dict[str, Any] = {"logit_bias": [[0, -100.0], [2, -100.0]]}
"""Nothing ends the text."""
GREEDY: dict[str, Any] = {"max_tokens": 40, **ON}
SAMPLED: dict[str, Any] = {
    "max_tokens": 40,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 5,
    "frequency_penalty": 0.1,
    **ON,
}


def line(rows: int) -> float:
    """A machine on which each row costs half of the first."""
    return 5.0 + 5.0 * rows


def test_lookup_goes_on_where_the_text_stood_before() -> None:
    text = Lookup([1, 2, 3, 4, 5, 9, 1, 2])
    assert text.draft(4) == ()
    assert text.push(3) is None
    assert text.draft(4) == (4, 5, 9, 1)
    assert text.draft(0) == ()
    assert text.push(4) is True
    assert text.draft(2) == (5, 9)
    assert text.push(6) is False
    assert text.draft(2) == ()
    # The last time counts: 1 2 3 went on with 4 6 then.
    for token in (1, 2, 3):
        text.push(token)
    assert text.draft(2) == (4, 6)


def test_a_run_guesses_no_further_than_it_is_long() -> None:
    assert Lookup([7, 7, 7, 7]).draft(8) == (7,)


def test_drafts_where_links_make_them_pay() -> None:
    policy = Policy()
    far = Pace().after(60.0, 20.0, 1, line(1))
    assert policy.far(far, line)
    assert policy.length(far, line, 15) >= 2
    assert policy.length(far, line, 1) == 1
    near = Pace().after(1.0, 20.0, 1, line(1))
    assert not policy.far(near, line)
    # One slow step is the machine's, not the link's.
    assert not policy.far(near.after(60.0, 20.0, 1, line(1)), line)
    assert not policy.far(far.after(1.0, 20.0, 1, line(1)), line)
    assert not NEVER.far(far, line)
    assert math.isinf(NEVER.least_share)


def test_what_does_not_hold_is_sent_no_more_until_it_holds() -> None:
    policy, pace = Policy(), Pace().after(60.0, 20.0, 1, line(1))
    lengths = []
    for hit in [False] * 30 + [True] * 40:
        pace = pace.guessed(hit)
        lengths.append(policy.length(pace, line, 15))
    assert lengths[29] == 0
    assert lengths[-1] == 15
    assert lengths[:30] == sorted(lengths[:30], reverse=True)


def test_full_batches_leave_no_room_for_drafts() -> None:
    alone = Pace(chance=0.8).after(20.0, 20.0, 1, line(1))
    crowded = Pace(chance=0.8).after(20.0, line(16), 16, line(16))
    assert Policy().length(alone, line, 15) > 0
    assert Policy().length(crowded, line, 3) == 0


def test_the_ring_cuts_drafts_and_drops_chunks() -> None:
    import numpy as np

    ring = SentRing()
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    ring.add(1, Kept(0, rows[:2], 1, True, (1, 2)))
    ring.add(1, Kept(2, rows[2:], 4, False, (3, 4, 5, 6)))
    ring.truncate(1, 4)
    last = ring.since(1, 2)[-1]
    assert (last.position, last.end, last.sample, last.tokens) == (2, 4, 1, (3, 4))
    assert last.hidden.tolist() == rows[2:4].tolist()
    assert ring.bytes == rows[:4].nbytes
    ring.truncate(1, 1)
    assert (ring.bytes, ring.since(1, 0)) == (0, [])


class Count:
    """Rows and calls of a node's decode steps since it was made."""

    def __init__(self, node: BenchNode) -> None:
        self._counters = node.stages.state.counters
        self._rows, self._calls = self._counters.decode_tokens, self._counters.decode_calls

    @property
    def drafts(self) -> int:
        return self._counters.decode_tokens - self._rows - self.calls

    @property
    def calls(self) -> int:
        return self._counters.decode_calls - self._calls


@pytest.mark.asyncio(loop_scope="module")
async def test_no_token_changes(bench: Bench) -> None:
    """Greedy and drawn, over two and three stages, through the loss of a tail and of a middle stage."""
    plain = await bench.add(0, LAST, n_ctx=512)
    head = await bench.add(0, 9, n_ctx=512, drafting=ALWAYS)
    tail = await bench.add(10, LAST, cuts=(20,), n_ctx=512)
    for options in (GREEDY, SAMPLED):
        expected = (await bench.run([plain], PROMPT, **options)).ids()
        count = Count(tail)
        answer = await bench.run([head, tail], PROMPT, **options)
        assert answer.ids() == expected
        assert count.drafts > 0, options
        if options is GREEDY:
            assert count.calls < len(expected) / 2
        doomed = await bench.add(10, LAST, n_ctx=512)
        again = await bench.run(
            [head, doomed],
            PROMPT,
            on_event=after(9, doomed.kill, rerouting(bench, [head.stage(), tail.stage()])),
            **options,
        )
        assert again.ids() == expected
        assert len(again.of(calls.Rerouted)) == 1
        middle, stands_in = await bench.add(10, 19, n_ctx=512), await bench.add(10, 19, n_ctx=512)
        ways = [[head.stage(), each.stage(), tail.stage(20)] for each in (middle, stands_in)]
        third = await bench.run(
            ways[0], PROMPT, on_event=after(9, middle.kill, rerouting(bench, ways[1])), **options
        )
        assert third.ids() == expected
        assert len(third.of(calls.Rerouted)) == 1
    await bench.settled()
