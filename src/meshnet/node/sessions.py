"""A node's sessions: what they are, and what makes a node refuse to open one or to run a step. No I/O."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from meshnet.engine.base import Engine, EngineInfo, Hidden, SamplingParams, SelfTest, Weight
from meshnet.node.batching import MAX_DECODE_ROWS, Lane
from meshnet.node.drafts import MOST_DRAFTS
from meshnet.node.links import Link
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.tickets import Ticket

CREDITS = 4
"""Steps of one session that may be on their way to a stage or wait there."""
KEPT_RESULTS = MOST_DRAFTS + 1
DTYPES: Mapping[str, np.dtype[np.generic]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}
MAX_SESSION_CHARS = 256


class Refused(Exception):
    """An open or a step is refused. `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Upstream(Protocol):
    """Where a session's steps come from: a peer's stream, or the call that runs at this head."""

    node_id: str

    def credit(self, session: Session) -> None: ...

    def lost(self, session: Session, node_id: str, code: str, message: str) -> None: ...


class Shard:
    """One loaded shard with its slots. `number` tells it from others in lanes."""

    def __init__(self, number: int, model: str, engine: Engine, test: SelfTest) -> None:
        self.number = number
        self.model = model
        self.engine = engine
        self.test = test
        self.info: EngineInfo = engine.info
        self.idle = 0
        """Slots that hold an idle prefix and can be taken."""
        self.accepts = True
        """False while it drains: no new calls."""
        self._free = set(range(engine.info.n_slots))

    @property
    def free_slots(self) -> int:
        """Slots that a new session can have."""
        return len(self._free) + self.idle

    @property
    def busy_slots(self) -> int:
        return self.info.n_slots - self.free_slots

    @property
    def mid_shard_entry(self) -> bool:
        """Whether a session may start at any of its layers."""
        return len(self.info.entry_layers) == self.info.last - self.info.first + 1

    def take_slot(self, hint: int | None = None) -> int | None:
        """The hinted slot or the lowest free one: neighbouring slots run as one piece of work."""
        if not self._free:
            return None
        slot = hint if hint is not None and hint in self._free else min(self._free)
        self._free.discard(slot)
        return slot

    def spare_slot(self) -> int | None:
        """A free slot, not taken: for what begins and ends within one turn of the engine thread."""
        return max(self._free, default=None)

    def give_slot(self, slot: int) -> None:
        self._free.add(slot)

    def runs(self, fingerprint: str, start: int, end: int) -> bool:
        """Whether a stage start..end of this model lies within the shard, at whatever entry."""
        return self.info.fingerprint == fingerprint and self.info.first <= start <= end <= self.info.last


@dataclass(slots=True)
class Outlet:
    """A session's way to the next stage: its link, and what waits until it may be sent."""

    link: Link
    stage: int
    dtype: str
    decode_ms: float
    row_ms: float
    forward_from: int = 0
    """Positions below are held there already."""
    sequence: int = 0
    answered: int = 0
    sampled: int = 0
    """The sequence after the last sampled step."""
    asked: deque[tuple[int, int]] = field(default_factory=deque)
    """Of sampled steps whose tokens have not come: the sequence after, and the first token's position."""
    waiting: deque[tuple[pb.Step, int]] = field(default_factory=deque)
    """Each with the sequence of the step that brought its rows, or -1."""

    @property
    def may_send(self) -> bool:
        return self.sequence - self.answered < CREDITS


@dataclass(slots=True)
class Session:
    """One choice of one call on one stage of this node, at one attempt (epoch)."""

    number: int
    id: str
    call_id: str
    epoch: int
    choice: int
    stage: int
    ticket: Ticket
    ticket_text: str
    shard: Shard
    slot: int
    start: int
    end: int
    max_positions: int
    dtype: str
    key: str
    sampling: SamplingParams | None
    upstream: Upstream
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """By position, as far as known: the prompt, and what was generated since."""
    accepted: int = 0
    """Positions that are computed or queued."""
    computed: int = 0
    drafted: bool = False
    """Some steps held drafts, so that not all of `tokens` need be the text's."""
    sequence: int = 0
    window: int = CREDITS
    answered: int = 0
    """Of the steps received, the sequence up to which a credit was given."""
    done: int = 0
    """The sequence up to which steps are computed and passed on."""
    untold: pb.StageTime | None = None
    """Times of steps that no result has told of yet."""
    waiters: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    """Who waits until so many positions are computed."""
    outlet: Outlet | None = None
    results: Link | None = None
    """The tail's way to the head; None where the head is this node."""
    kept: deque[pb.Token] = field(default_factory=lambda: deque(maxlen=KEPT_RESULTS))
    left: tuple[Link, pb.Close] | None = None
    """Ends what the attempt that this one took over had opened below."""
    ready: bool = False
    """Open here and on all stages below."""
    closed: bool = False
    parked_at: float | None = None
    """Since when it waits for another attempt to take it over: its route broke."""
    opened_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> tuple[str, int]:
        return (self.id, self.stage)

    @property
    def is_tail(self) -> bool:
        return self.stage == len(self.ticket.stages) - 1

    @property
    def lane(self) -> Lane:
        return (self.shard.number, self.start, self.end)

    @property
    def pending(self) -> int:
        """Steps that wait for the engine, or are computed and wait to be sent on."""
        return self.sequence - self.done

    def wake(self) -> None:
        """Lets those go on who wait until what is computed by now is computed."""
        for waiter in [waiter for waiter in self.waiters if self.computed >= waiter[0]]:
            self.waiters.remove(waiter)
            if not waiter[1].done():
                waiter[1].set_result(None)

    def fail_waiters(self) -> None:
        """What they wait for will not be computed."""
        for _, future in self.waiters:
            if not future.done():
                future.set_exception(Refused("closed", f"session {self.id} came to an end"))
        self.waiters.clear()

    def note_tokens(self, position: int, tokens: Sequence[int]) -> None:
        """Remembers the tokens at `position`..; a gap ends what is known."""
        if position > len(self.tokens):
            return
        del self.tokens[position:]
        self.tokens.extend(tokens)


def session_id(call_id: str, epoch: int, choice: int) -> str:
    """`<call_id>/<epoch>/<choice>`."""
    return f"{call_id}/{epoch}/{choice}"


def parse_session(text: str) -> tuple[str, int, int]:
    """(call id, epoch, choice). Raises Refused."""
    parts = text.rsplit("/", 2)
    if len(text) <= MAX_SESSION_CHARS and len(parts) == 3 and parts[0]:
        call, epoch, choice = parts
        if all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (epoch, choice)):
            return call, int(epoch), int(choice)
    raise Refused("bad_session", f"session {text[:80]!r} is not of the form CALL/EPOCH/CHOICE")


def belongs(session: str, ticket: Ticket) -> bool:
    """Whether a ticket covers a session: the same attempt of the same call, or a numbered part of it."""
    call, epoch, _ = parse_session(session)
    return epoch == ticket.epoch and (call == ticket.call_id or call.startswith(f"{ticket.call_id}."))


def check_open(message: pb.Open, ticket: Ticket, node_id: str, shards: Sequence[Shard]) -> Shard:
    """The shard that will run the session. Raises Refused where the message does not fit the ticket or
    this node."""
    if not belongs(message.session, ticket):
        raise Refused("ticket", f"the ticket is for call {ticket.call_id}, not for {message.session[:80]}")
    if message.stage >= len(ticket.stages):
        raise Refused("route", f"stage {message.stage} is not one of the route's {len(ticket.stages)}")
    stage = ticket.stages[message.stage]
    if stage.node_id != node_id:
        raise Refused("route", f"stage {message.stage} belongs to {stage.node_id}; this is {node_id}")
    if (stage.start_layer, stage.end_layer) != (message.start_layer, message.end_layer):
        raise Refused(
            "route",
            f"layers {message.start_layer}-{message.end_layer} were asked for, the ticket's stage "
            f"{message.stage} has {stage.start_layer}-{stage.end_layer}",
        )
    if message.fingerprint != ticket.fingerprint:
        raise Refused("fingerprint", "the session's model is not the ticket's; both ends need the same file")
    shard = find_shard(shards, ticket.fingerprint, stage.start_layer, stage.end_layer)
    info = shard.info
    if message.stage and message.n_embd != info.n_embd:
        raise Refused("shape", f"hidden states of {message.n_embd} values were announced, not {info.n_embd}")
    if message.stage and message.dtype not in DTYPES:
        raise Refused("dtype", f"dtype is {message.dtype!r}; f32 and f16 are possible")
    if (stage.end_layer == info.model_layers - 1) != (message.stage == len(ticket.stages) - 1):
        raise Refused("route", f"the route's last stage must end at layer {info.model_layers - 1}")
    if not 0 < message.max_positions <= info.n_ctx:
        raise Refused(
            "context", f"{message.max_positions} positions were asked for, a slot here holds {info.n_ctx}"
        )
    if len(message.tokens) > message.max_positions:
        raise Refused("context", f"{len(message.tokens)} tokens do not fit {message.max_positions} positions")
    return shard


def find_shard(shards: Sequence[Shard], fingerprint: str, start: int, end: int) -> Shard:
    """The loaded shard that can enter at `start` and leave after `end`. Raises Refused."""
    same = [shard for shard in shards if shard.info.fingerprint == fingerprint]
    if not same:
        raise Refused("fingerprint", "this node holds no shard of a model with that fingerprint")
    holding = [shard for shard in same if shard.runs(fingerprint, start, end)]
    if not holding:
        has = ", ".join(f"{shard.info.first}-{shard.info.last}" for shard in same)
        raise Refused("layers", f"layers {start}-{end} were asked for; this node holds {has}")
    for shard in holding:
        if start in shard.info.entry_layers:
            return shard
    entries = ", ".join(str(layer) for shard in holding for layer in shard.info.entry_layers)
    raise Refused("layers", f"layer {start} is no entry layer here; entry layers are {entries}")


def check_step(session: Session, step: pb.Step) -> None:
    """Raises Refused (bad_step) where a step cannot be the session's next one. Rollback is a step that
    begins below what the session holds."""
    if not session.ready:
        raise Refused("bad_step", "the session is not open yet")
    # Each look into a message costs: once per field.
    position, rows, tokens = step.position, step.rows, len(step.tokens)
    if step.sequence != session.sequence:
        raise Refused("bad_step", f"step {step.sequence} came where {session.sequence} was expected")
    if position > session.accepted:
        raise Refused("bad_step", f"position {position} came where {session.accepted} was expected")
    if not 0 < rows <= session.shard.info.max_rows:
        raise Refused("bad_step", f"{rows} rows; 1 to {session.shard.info.max_rows} are possible")
    if position + rows > session.max_positions:
        raise Refused(
            "bad_step", f"{position + rows} positions; the session was opened for {session.max_positions}"
        )
    if step.sample > rows:
        raise Refused("bad_step", f"{step.sample} samples of {rows} rows")
    if rows > MAX_DECODE_ROWS and not step.prefill:
        raise Refused("bad_step", f"{rows} rows in one decode step; {MAX_DECODE_ROWS} are possible")
    if tokens not in (0, rows):
        raise Refused("bad_step", f"{tokens} tokens for {rows} rows")
    # After a reroute a token of the old tail may bring a next step before those of the replay are answered.
    most = session.window + CREDITS
    if session.pending >= most:
        raise Refused("bad_step", f"more than {most} steps at once; wait for credits")


def read_hidden(step: pb.Step, n_embd: int, dtype: str) -> Hidden:
    """The step's rows, float32, shape (rows, n_embd); a view of the message where it has that type.

    Raises Refused. NaN and infinities are the engine's to refuse."""
    if step.dtype != dtype:
        raise Refused("bad_step", f"dtype {step.dtype!r}; the session was opened with {dtype}")
    kind = DTYPES[dtype]
    data, rows = step.data, step.rows
    expected = rows * n_embd * kind.itemsize
    if len(data) != expected:
        raise Refused(
            "bad_step", f"{len(data)} bytes for {rows} rows of {n_embd} {dtype}; {expected} are expected"
        )
    values = np.frombuffer(data, dtype=kind).reshape(rows, n_embd)
    return np.ascontiguousarray(values, dtype=np.float32)


def write_hidden(hidden: Hidden, dtype: str) -> bytes:
    """Rows as they travel; values beyond half precision's range are cut to it."""
    if dtype == "f16":
        return np.clip(hidden, -65504.0, 65504.0).astype("<f2").tobytes()
    return hidden.astype("<f4", copy=False).tobytes()


def sampling_to_wire(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        choice=params.choice,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repeat_penalty=params.repeat_penalty,
        logit_bias=[pb.LogitBias(token=token, bias=bias) for token, bias in params.logit_bias],
        grammar=params.grammar,
        logprobs=params.logprobs,
        prompt_tokens=params.prompt_tokens,
        check=params.check,
    )


def weight_to_wire(weight: Weight | None) -> pb.Weight | None:
    if weight is None:
        return None
    return pb.Weight(logit=weight.logit, max_logit=weight.max_logit, kept=weight.kept)


def sampling_from_wire(message: pb.Sampling) -> SamplingParams:
    """The engine checks the values."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        choice=message.choice,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repeat_penalty=message.repeat_penalty,
        logit_bias=tuple((bias.token, bias.bias) for bias in message.logit_bias),
        grammar=message.grammar,
        logprobs=message.logprobs,
        prompt_tokens=message.prompt_tokens,
        check=tuple(message.check),
    )
