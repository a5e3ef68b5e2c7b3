"""Accepts calls and runs them: books, tickets, routes, settlement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from meshnet.protocol.calls import GenerateCall
from meshnet.protocol.errors import ApiError
from meshnet.protocol.openai import ChatRequest, CompletionRequest, check_tools
from meshnet.routing import Stage
from meshnet.tracker import calls
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import BooksUnavailable, KeyInfo, Refusal
from meshnet.tracker.catalogue import Model
from meshnet.tracker.checking import Checker
from meshnet.tracker.client import Client
from meshnet.tracker.gathering import Gathered
from meshnet.tracker.heads import HeadError, Heads
from meshnet.tracker.jobs import Chosen
from meshnet.tracker.live import LiveCall
from meshnet.tracker.placement import Placement
from meshnet.tracker.planning import ModelRouting
from meshnet.tracker.prefixes import Prefixes
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.results import Result
from meshnet.tracker.roster import Roster
from meshnet.tracker.running import Run
from meshnet.tracker.seat import Order, Seat
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.settlement import Settlement
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.signing import Signer, draw
from meshnet.tracker.sinks import Sink

DEFAULT_MAX_TOKENS = 1_024
SHORT = frozenset({"insufficient_quota", "budget_exceeded"})
TEMPLATE_BYTES = 256
BYTES_PER_TOKEN = 3
"""A cautious guess, for planning only; what is charged is counted."""

_encode = msgspec.json.Encoder().encode
log = structlog.get_logger("meshnet.calls")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A call that may run; `run.go()` runs it."""

    run: Run
    model: Model


class Orchestrator:
    """The surroundings of every running call."""

    def __init__(
        self,
        settings: TrackerSettings,
        books: Books,
        roster: Roster,
        shelf: Shelf,
        placement: Placement,
        heads: Heads,
        recorder: Recorder,
        routing_of: Callable[[str], ModelRouting],
    ) -> None:
        self.settings = settings
        self.books = books
        self.roster = roster
        self.shelf = shelf
        self.placement = placement
        self.heads = heads
        self.recorder = recorder
        self.routing_of = routing_of
        self.signer = Signer(books.mesh.id, books.mesh.signing_secret, books.clock)
        self.checker = Checker(books, roster, placement, heads, recorder.console, self.signer.sign)
        self._settlement = Settlement(books, self.checker)
        self._prefixes = Prefixes(roster.clock)
        self._runs: dict[str, Run] = {}
        roster.on_gone(self._node_gone)

    # ------------------------------------------------------------ accepting

    async def accept(
        self,
        key: KeyInfo,
        request: ChatRequest | CompletionRequest,
        request_id: str,
        make_sink: Callable[[str, Model], Sink],
        forced: tuple[str, ...] = (),
    ) -> Accepted:
        """Checks, reserves in the books and registers a call. Raises ApiError before any work."""
        model = self.model_for(key, request.model)
        self.shelf.use(model.model_id)
        kind = "chat" if isinstance(request, ChatRequest) else "completion"
        if isinstance(request, ChatRequest):
            check_tools(request, model.card.tools)
        call_id, ready = self.signer.begin(model.model_id)
        seed = request.seed if request.seed is not None else draw(63)
        prefix_key = f"account-{key.account_id}"
        plain = request.to_request()
        prompt_tokens = min(estimate_tokens(request), model.n_ctx)
        # An estimate must not cut short what the context has room for: the head counts, and stops there.
        max_tokens = _max_tokens(request.max_tokens, model.n_ctx)
        now_ms = self.books.clock()
        price = (await self.books.prices.current()).at(model.model_id, now_ms)
        most = prompt_tokens if price.free else min(most_tokens(request, plain), model.n_ctx)
        refusal = await self._reserve(call_id, key, model, most, request.n * max_tokens, now_ms)
        if refusal is not None and refusal.code in SHORT and not price.free:
            # It may be enough for what the prompt really comes to, which only a head can tell.
            prompt_tokens = await self._count_prompt(call_id, kind, model, plain, seed, prefix_key)
            max_tokens = _max_tokens(request.max_tokens, model.n_ctx - prompt_tokens)
            most = request.n * max_tokens
            refusal = await self._reserve(call_id, key, model, prompt_tokens, most, now_ms, again=True)
        if refusal is not None:
            raise as_api_error(refusal)
        fallback = self.settings.fallback_models.get(model.model_id)
        turn = self._prefixes.hashes(prefix_key, model.model_id, request)
        order = Order(
            call_id=call_id,
            kind=kind,
            model=model.model_id,
            key=str(key.id),
            request=plain,
            n=request.n,
            seed=seed,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            prefix_key=prefix_key,
            forced=forced,
            fallback=fallback,
            cached_tokens=self._prefixes.find(turn),
            turn=tuple(turn),
            ready=ready,
        )
        live = LiveCall(
            call_id=call_id,
            request_id=request_id,
            model=model.model_id,
            key=key.name,
            key_id=key.id,
            kind=kind,
            stream=request.stream,
            accepted_ms=now_ms,
            accepted_at=time.monotonic(),
        )
        rules = calls.Rules(self.settings.max_reroutes, fallback is not None)
        run = Run(
            self,
            order,
            live,
            Client(make_sink(call_id, model), self.settings.stalled_reader_s),
            calls.State(rules),
            Seat(order, live, self.placement, self.recorder, self.settings, model.model_id),
            Gathered(request.n),
        )
        self._runs[call_id] = run
        self.recorder.accepted(live)
        return Accepted(run, model)

    async def _reserve(
        self,
        call_id: str,
        key: KeyInfo,
        model: Model,
        prompt_tokens: int,
        output_tokens: int,
        now_ms: int,
        *,
        again: bool = False,
    ) -> Refusal | None:
        """Sets aside the most that a call can cost. Raises ApiError (503) without a database."""
        try:
            reserved = await self.books.reserve(
                call_id, key, model.model_id, prompt_tokens, output_tokens, now_ms, counted=again
            )
        except BooksUnavailable as error:
            raise ApiError(
                503, error.message, type="server_error", code=error.code, retry_after=error.retry_after
            ) from error
        return reserved if isinstance(reserved, Refusal) else None

    async def run(self, accepted: Accepted) -> Result:
        """Runs an accepted call to its end, in the task of its client."""
        try:
            return await accepted.run.go()
        finally:
            self._runs.pop(accepted.run.order.call_id, None)
            self.recorder.metrics.sent.inc(accepted.run.client.sink.sent_bytes)

    def cancel(self, call_id: str, code: str, message: str) -> bool:
        """Ends a call that runs. False when there is none of that id."""
        run = self._runs.get(call_id)
        return run is not None and run.cancel(calls.Cancelled(code, message))

    def cancel_all(self, message: str) -> None:
        for run in list(self._runs.values()):
            run.cancel(calls.Cancelled("shutdown", message, failed_with=503))

    @property
    def running(self) -> int:
        return len(self._runs)

    def model_for(self, key: KeyInfo, name: str) -> Model:
        """The model of a request. Raises ApiError (404) as OpenAI does."""
        model = self.shelf.find(name)
        if model is None or not key.may_use(model.model_id):
            raise ApiError(
                404,
                f"The model '{name[:100]}' does not exist or you do not have access to it.",
                code="model_not_found",
                param="model",
            )
        return model

    async def _count_prompt(
        self, call_id: str, kind: str, model: Model, request: dict[str, object], seed: int, prefix_key: str
    ) -> int:
        """The exact number of prompt tokens, asked of a head. Raises ApiError."""
        problem = "no live node holds its first layer"
        for view in self.placement.views(model.model_id):
            for state in view.states:
                ends = [last for first, last in state.served_layers if first == 0]
                node = self.roster.state.nodes.get(state.node_id)
                if not ends or node is None or state.node_id not in view.routable:
                    continue
                chosen = Chosen((Stage(state.node_id, 0, max(ends)),), view, "")
                ticket = self.signer.sign(call_id, model.model_id, 0, chosen)
                asked = GenerateCall(
                    call_id, 0, kind, model.model_id, request, ticket, seed, 1, prefix_key=prefix_key
                )
                patience_s = self.settings.first_event_s
                try:
                    async with asyncio.timeout(patience_s):
                        return await self.heads.tokenize(node.way, asked)
                except TimeoutError:
                    problem = f"node {node.name} did not answer within {patience_s:g} s"
                except HeadError as error:
                    if error.status in (400, 422):
                        raise ApiError(400, error.message, code=error.code, param=error.param) from error
                    problem = f"node {node.name}: {error.message}"
        raise ApiError(
            503,
            f"the prompt for {model.model_id!r} cannot be counted: {problem}",
            type="server_error",
            code="no_route",
            retry_after=5,
        )

    # ------------------------------------------------------------ what running calls need

    async def settle(self, run: Run, result: Result) -> None:
        self.placement.took(time.monotonic() - run.live.accepted_at)
        if result.end.outcome == "complete" and result.chosen is not None:
            nodes = tuple(stage.node_id for stage in result.chosen.stages)
            tokens = run.live.prompt_tokens + result.gathered.tokens
            self._prefixes.remember(list(run.order.turn), nodes, tokens)
        await self._settlement.settle(run, result)

    def _node_gone(self, node_id: str, reason: str) -> None:
        self._prefixes.forget_node(node_id)
        for run in list(self._runs.values()):
            run.node_gone(node_id, reason)


def estimate_tokens(request: ChatRequest | CompletionRequest) -> int:
    """A rough number of prompt tokens, before any tokeniser has seen the prompt."""
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        return max(1, len(prompt.encode()) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt))
    return sum(8 + len(message.content.encode()) // BYTES_PER_TOKEN for message in request.messages)


def most_tokens(request: ChatRequest | CompletionRequest, plain: dict[str, Any]) -> int:
    """At least as many as any tokeniser makes of the prompt.

    None makes more than one of each byte, and the JSON around a message is longer than a template's markup.
    """
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        return len(request.prompt) + 1
    return len(_encode(plain)) + TEMPLATE_BYTES


def _max_tokens(asked: int | None, left: int) -> int:
    """What may be generated per choice: as asked, or 1,024, within what is left of the context."""
    return min(max(1, left), DEFAULT_MAX_TOKENS if asked is None else asked)


def as_api_error(refusal: Refusal) -> ApiError:
    return ApiError(
        refusal.status,
        refusal.message,
        type=refusal.type,
        code=refusal.code,
        param=refusal.param,
        retry_after=refusal.retry_after,
    )
