"""The calls whose head this node is: started over HTTP, found again when tokens come back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import structlog

from meshnet.node.call import Call
from meshnet.node.drafts import Policy as Drafting
from meshnet.node.headmodel import HeadModel
from meshnet.node.pipeline import PipelineMeter
from meshnet.node.sessions import Refused, Shard, belongs, find_shard, parse_session
from meshnet.node.stages import Stages
from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.errors import ApiError
from meshnet.protocol.tickets import Ticket

MAX_CALLS = 1024

log = structlog.get_logger()


class HeadCalls:
    """Event loop only. `model_of` gives what a head knows of a shard's model."""

    def __init__(
        self,
        stages: Stages,
        verify: Callable[[str], Ticket],
        model_of: Callable[[Shard], HeadModel],
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
    ) -> None:
        self._stages = stages
        self._verify = verify
        self._model_of = model_of
        self._drafting = drafting
        self._calls: dict[str, tuple[Call, asyncio.Task[None]]] = {}
        self._meter = PipelineMeter()
        self._parts = itertools.count(1)
        stages.take_result = self.take_result

    def __len__(self) -> int:
        return len(self._calls)

    # ---------------------------------------------------------------- results from tails

    def expect(self, message: pb.Open, node_id: str) -> None:
        """A tail asks to deliver results of a session. Raises Refused."""
        ticket = self._verify(message.ticket)
        call_id, _, _ = parse_session(message.session)
        if not belongs(message.session, ticket) or message.stage != len(ticket.stages):
            raise Refused("ticket", "the ticket does not cover this session's results")
        if ticket.stages[0].node_id != self._stages.node_id or ticket.stages[-1].node_id != node_id:
            raise Refused("route", "results go from the tail of a route to its head")
        if call_id not in self._calls:
            raise Refused("closed", f"call {call_id} does not run here")

    def take_result(self, session: str, tokens: Sequence[pb.Token], times: Sequence[pb.StageTime]) -> None:
        try:
            call_id, _, _ = parse_session(session)
        except Refused:
            return
        running = self._calls.get(call_id)
        if running is None:
            return
        try:
            running[0].take_result(session, tokens, times)
        except Exception:
            # It is one call's; the stream that brought the tokens serves others.
            log.exception("tokens could not be taken", call_id=call_id)
            running[0].fault("the node ran into a fault of its own; its log says more")

    # ---------------------------------------------------------------- from the tracker, or from clients

    def admit(self, text: str) -> tuple[Ticket, Shard]:
        """The ticket of a request and the shard that its route begins with. Raises ApiError."""
        try:
            ticket = self._verify(text)
        except Refused as refused:
            raise ApiError(401, refused.message, type="authentication_error", code="bad_ticket") from refused
        if not ticket.stages or ticket.stages[0].node_id != self._stages.node_id:
            raise ApiError(
                403, "the ticket's route does not begin at this node", type="permission_error", code="route"
            )
        stage = ticket.stages[0]
        try:
            return ticket, find_shard(
                self._stages.shards, ticket.fingerprint, stage.start_layer, stage.end_layer
            )
        except Refused as refused:
            raise ApiError(
                503, refused.message, type="server_error", code=refused.code, retry_after=1
            ) from refused

    async def tokenize(self, request: calls.GenerateCall) -> int:
        """Tokens of a request's prompt. Raises ApiError."""
        _, shard = self.admit(request.ticket)
        prompt = await asyncio.to_thread(self._model_of(shard).prompt, request)
        return len(prompt.tokens)

    async def start(self, request: calls.GenerateCall, *, part: bool = False) -> Call:
        """Starts a call. `part`: the ticket is a client's and may serve several calls. Raises ApiError."""
        ticket, shard = self.admit(request.ticket)
        if ticket.call_id != request.call_id or ticket.epoch != request.epoch:
            raise ApiError(403, "the ticket is for another call", type="permission_error", code="ticket")
        model = self._model_of(shard)
        prompt = await asyncio.to_thread(model.prompt, request)
        n_ctx = shard.info.n_ctx
        if len(prompt.tokens) >= n_ctx:
            raise ApiError(
                400,
                f"The prompt has {len(prompt.tokens)} tokens; the context holds {n_ctx}, the answer "
                "included. Shorten it.",
                code="context_length_exceeded",
                param="messages" if request.kind == "chat" else "prompt",
            )
        if request.check and request.check_choice >= prompt.choices:
            raise ApiError(
                400,
                f"check_choice is {request.check_choice}; the call has {prompt.choices} choices",
                code="invalid_value",
                param="check_choice",
            )
        call_id = f"{request.call_id}.{next(self._parts)}" if part else request.call_id
        await self._end_older(call_id, request.epoch)
        if len(self._calls) >= MAX_CALLS:
            raise ApiError(
                503, "this node runs too many calls", type="server_error", code="busy", retry_after=1
            )
        call = Call(
            request,
            ticket,
            prompt,
            model.tokenizer,
            self._stages,
            self._meter,
            call_id=call_id,
            n_ctx=n_ctx,
            drafting=self._drafting,
        )
        task = asyncio.create_task(self._run(call), name=f"call {call_id}")
        self._calls[call_id] = (call, task)
        return call

    async def _end_older(self, call_id: str, epoch: int) -> None:
        """A newer attempt takes the place of one that still runs here."""
        running = self._calls.get(call_id)
        if running is None:
            return
        if running[0].epoch >= epoch:
            raise ApiError(409, f"call {call_id} is running here already", code="duplicate")
        await self.cancel(running[0])

    async def _run(self, call: Call) -> None:
        started = time.monotonic()
        bound = log.bind(call_id=call.call_id)
        bound.info("call begins", epoch=call.epoch)
        try:
            await call.run()
        except asyncio.CancelledError:
            bound.info("call cancelled")
            raise
        except Exception:
            bound.exception("call failed by a fault of this node")
            call.events.put(calls.CallError(500, "internal", "the node ran into a fault of its own"))
        else:
            bound.info("call ended", seconds=round(time.monotonic() - started, 3))
        finally:
            call.events.end()
            if self._calls.get(call.call_id, (None,))[0] is call:
                del self._calls[call.call_id]

    async def cancel(self, call: Call) -> None:
        """Ends a call, and returns when everything it held here is free."""
        running = self._calls.get(call.call_id)
        if running is None or running[0] is not call:
            return
        running[1].cancel()
        await asyncio.wait([running[1]])

    def end_attempts(self, call_id: str, before_epoch: int) -> None:
        """Ends a call here that goes on elsewhere: an attempt before this one, or (0) any."""
        running = self._calls.get(call_id)
        if running is not None and (not before_epoch or running[0].epoch < before_epoch):
            running[1].cancel()

    def reroute(self, call_id: str, reroute: calls.Reroute) -> None:
        """A new route for a running call. Raises ApiError."""
        ticket, _ = self.admit(reroute.ticket)
        if ticket.call_id != call_id or ticket.epoch != reroute.epoch:
            raise ApiError(403, "the ticket is for another call", type="permission_error", code="ticket")
        running = self._calls.get(call_id)
        if running is None:
            raise ApiError(404, f"call {call_id} does not run here", code="no_call")
        if not running[0].reroute(ticket, reroute.ticket):
            raise ApiError(
                503,
                f"call {call_id} was told too much at once",
                type="server_error",
                code="busy",
                retry_after=1,
            )

    async def stop(self) -> None:
        """Ends all calls."""
        tasks = [task for _, task in self._calls.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
