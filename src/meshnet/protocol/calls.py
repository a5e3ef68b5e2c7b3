"""What the tracker sends to a head node and what comes back while a call runs.

`POST /internal/calls` takes a `GenerateCall` (JSON) and answers `application/x-meshnet-events`: one JSON
`Event` per line; an empty line, sent when nothing has happened for `ALIVE_S`, says that the head is alive.
`POST /internal/calls/{call_id}/reroute` takes a `Reroute`. Closing the response ends the call on every node.
Both need the ticket's signature, nothing else authenticates the tracker. It stands in `TICKET_HEADER`, too:
of somebody without one a node reads no body.
"""

from __future__ import annotations

from typing import Any

import msgspec

NO_WAY_BACK = "no_way_back"
"""Code of a loss: the tail, which the head reaches, does not reach the head. Either may be cut off."""
TICKET_HEADER = "x-meshnet-route"
EVENTS_MEDIA_TYPE = "application/x-meshnet-events"
ALIVE_S = 2.0
"""A stream on which nothing happened for so many seconds says that its head is alive: whoever reads it need
not guess whether the node is dead or has much to do."""


class RouteStage(msgspec.Struct, frozen=True, tag=False):
    """One stage as nodes need it: who runs which layers (inclusive) and where to dial it."""

    node_id: str
    start_layer: int
    end_layer: int
    grpc_address: str


class GenerateCall(msgspec.Struct, frozen=True):
    """One attempt at a call. `request` is the validated OpenAI body (protocol/openai.py)."""

    call_id: str
    epoch: int
    """0 for the first attempt; +1 each time a new head takes over."""
    kind: str
    """chat or completion."""
    model: str
    request: dict[str, Any]
    ticket: str
    seed: int
    max_tokens: int
    prefix_key: str = ""
    resume: tuple[tuple[int, ...], ...] = ()
    """Per choice the tokens that were already streamed; they are replayed, not sent again."""
    prompt_chunk: int = 256
    reuse_prefix: bool = True
    ended: tuple[int, ...] = ()
    """Choices that already ended; they are not run again."""
    spans: tuple[tuple[int, int], ...] = ()
    """On a resume what the first head said in `Opened.spans`: how the prompt was batched then."""
    check: tuple[int, ...] = ()
    """Tokens of a finished answer (its end-of-sequence token included) to be weighed instead of generating:
    after the prompt they stand as the tokens of choice `check_choice`, whatever the tail draws, step by step
    as they did at first. The head answers with `Weighed` events, in order and without gaps, then `Done`."""
    check_choice: int = 0


class Reroute(msgspec.Struct, frozen=True):
    """A new route for a running call whose head stays; sent after a `lost` event."""

    epoch: int
    ticket: str
    failed: tuple[str, ...]


class TokenCount(msgspec.Struct, frozen=True):
    """Answer of `POST /internal/tokenize` (a GenerateCall without ticket use beyond its signature)."""

    prompt_tokens: int


class Event(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of what a head reports, in order, one JSON object per line."""


class Opened(Event, frozen=True, tag="opened"):
    prompt_tokens: int
    reused_tokens: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of positions that were computed in one engine call each, from position 0 on; empty:
    the prompt in chunks of `prompt_chunk`. Whoever rebuilds the session keeps to them."""


class Prefill(Event, frozen=True, tag="prefill"):
    done: int
    total: int


class TokenEvent(Event, frozen=True, tag="tok", omit_defaults=True):
    """New tokens of one choice and the text they completed (may be empty: held back for UTF-8 or stop)."""

    c: int
    ids: tuple[int, ...]
    text: str = ""
    lp: tuple[tuple[str, float, tuple[int, ...], tuple[tuple[str, float, tuple[int, ...]], ...]], ...] = ()
    """Per token: (piece, logprob, bytes, alternatives as (piece, logprob, bytes))."""


class ChoiceEnd(Event, frozen=True, tag="end", omit_defaults=True):
    c: int
    reason: str
    """stop or length; the front door turns stop into tool_calls where the text is a tool call."""
    by: str
    """eos, stop_string, limit, context or grammar: decides whether a short answer is suspect."""
    text: str = ""
    """What was held back and belongs to the answer."""
    token: int = -1
    """The end-of-sequence token that was drawn, where `by` is eos or grammar; no event else names it."""


class StageTimes(msgspec.Struct, frozen=True):
    node_id: str
    start_layer: int
    end_layer: int
    compute_ms: float
    """Sum over the call so far."""
    queue_ms: float
    link_ms: float
    """Trip to the next stage (the tail's: to the head)."""
    steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_ms: float = 0.0
    """The part of `compute_ms` that went into steps of more than one row; 0 with `decode_ms`: not told."""
    decode_ms: float = 0.0


class Stages(Event, frozen=True, tag="stages"):
    stages: tuple[StageTimes, ...]


class LostNode(Event, frozen=True, tag="lost"):
    """The route broke; the head waits for a Reroute (or for the response to be closed)."""

    node_id: str
    code: str
    message: str


class Rerouted(Event, frozen=True, tag="rerouted"):
    epoch: int
    replayed_rows: int
    ms: float


class WeighedToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of `GenerateCall.check` as this route's sampler sees it: with bias, penalties and grammar."""

    token: int
    logit: float
    """-1e30 where the grammar does not allow it."""
    max_logit: float
    drawn: int
    """The token that this route draws itself at the position."""
    kept: bool
    """Whether the sampler keeps the token there (top_k, top_p, min_p)."""


class Weighed(Event, frozen=True, tag="weighed"):
    """Answers to `GenerateCall.check`, in the order of its tokens."""

    rows: tuple[WeighedToken, ...]


class CallError(Event, frozen=True, tag="error"):
    status: int
    code: str
    message: str
    param: str | None = None
    type: str = "server_error"


class Done(Event, frozen=True, tag="done"):
    """Last event: all choices ended and everything the call held is free."""

    prompt_tokens: int
    output_tokens: int
    reused_tokens: int = 0


AnyEvent = (
    Opened | Prefill | TokenEvent | ChoiceEnd | Stages | LostNode | Rerouted | Weighed | CallError | Done
)
encode_event = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(AnyEvent).decode
