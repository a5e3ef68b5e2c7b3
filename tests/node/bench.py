"""Nodes without a tracker: real engines, real sockets, tickets signed by the test."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.engine.base import SelfTest
from meshnet.engine.llama import LlamaEngine
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store
from meshnet.node.call import Call
from meshnet.node.dataplane import DataPlane, DataPlaneServer
from meshnet.node.drafts import NEVER, Policy
from meshnet.node.headcalls import HeadCalls
from meshnet.node.headmodel import HeadModel
from meshnet.node.lines import LineDialler
from meshnet.node.links import Links
from meshnet.node.ring import SentRing
from meshnet.node.sessions import Shard
from meshnet.node.stages import Stages
from meshnet.node.verify import Verifier
from meshnet.protocol import calls
from meshnet.protocol.calls import RouteStage
from meshnet.protocol.tickets import Ticket, sign_ticket

MESH = "mesh-of-the-test"
TEST = SelfTest(0.2, 0.02, 0.1, 0.5, {1: 3.0, 8: 12.0})
LAST = 29


@dataclass
class BenchNode:
    """One node: its parts, and where it is dialled."""

    node_id: str
    stages: Stages
    heads: HeadCalls
    links: Links
    server: DataPlaneServer
    first: int
    last: int
    dead: bool = False
    address_override: str = ""

    @property
    def address(self) -> str:
        return self.address_override or f"127.0.0.1:{self.server.port}"

    def stage(self, start: int | None = None, end: int | None = None) -> RouteStage:
        return RouteStage(
            self.node_id,
            self.first if start is None else start,
            self.last if end is None else end,
            self.address,
        )

    @property
    def held(self) -> int:
        """Slots in use, whatever for."""
        return sum(shard.busy_slots for shard in self.stages.shards)

    async def kill(self) -> None:
        """Gone from one moment to the next, as far as others can see."""
        if not self.dead:
            self.dead = True
            await self.server.stop(0)
            await self.links.stop()
            self.stages.executor.stop()


@dataclass
class Answer:
    """What a call said."""

    events: list[calls.AnyEvent] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def ids(self, choice: int = 0) -> list[int]:
        return [i for event in self.of(calls.TokenEvent) if event.c == choice for i in event.ids]

    def text(self, choice: int = 0) -> str:
        parts = [event.text for event in self.of(calls.TokenEvent) if event.c == choice]
        return "".join(parts + [event.text for event in self.of(calls.ChoiceEnd) if event.c == choice])

    @property
    def end(self) -> calls.ChoiceEnd:
        found: calls.ChoiceEnd = self.of(calls.ChoiceEnd)[0]
        return found


class Bench:
    """A mesh of nodes in this process, and its tickets."""

    def __init__(self, model: ModelFile, store: Store) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.model = model
        self.store = store
        self.nodes: list[BenchNode] = []
        self._numbers = itertools.count(1)
        self._models: list[HeadModel] = []

    async def add(
        self,
        first: int,
        last: int,
        *,
        cuts: Sequence[int] = (),
        n_slots: int = 4,
        n_ctx: int = 1024,
        ring: SentRing | None = None,
        drafting: Policy = NEVER,
        lines: bool = True,
    ) -> BenchNode:
        node_id = f"n{next(self._numbers)}-{secrets.token_hex(3)}"
        verifier = Verifier()
        verifier.use(MESH, self.key.public_key())
        plane: list[DataPlane] = []
        links = Links(lambda: plane[0].hello(), lines=LineDialler() if lines else None)
        stages = Stages(node_id, links, verifier.verify, ring=ring)
        models: dict[int, HeadModel] = {}
        heads = HeadCalls(stages, verifier.verify, lambda shard: models[shard.number], drafting)
        plane.append(DataPlane(node_id, lambda: MESH, stages, heads))
        server = DataPlaneServer(plane[0])
        await server.start("127.0.0.1", 0)
        if lines:
            await server.offer_lines("127.0.0.1")
        stages.executor.start()
        engine = await asyncio.to_thread(
            LlamaEngine.load,
            self.model,
            first,
            last,
            cuts=cuts,
            n_slots=n_slots,
            n_ctx=n_ctx,
            threads=1,
            store=self.store,
        )
        shard = Shard(0, "smollm2", engine, TEST)
        stages.shards.append(shard)
        stages.state.seed(shard)
        if first == 0:
            models[0] = HeadModel("smollm2", self.model)
            self._models.append(models[0])
        node = BenchNode(node_id, stages, heads, links, server, first, last)
        self.nodes.append(node)
        return node

    def ticket(self, call_id: str, epoch: int, stages: Sequence[RouteStage], **changes: Any) -> str:
        ticket = Ticket(
            mesh_id=MESH,
            call_id=call_id,
            epoch=epoch,
            model="smollm2",
            fingerprint=self.model.fingerprint,
            stages=tuple(stages),
            expires_ms=int(time.time() * 1000) + 60_000,
        )
        return sign_ticket(replace_struct(ticket, changes), self.key)

    def request(
        self,
        stages: Sequence[RouteStage],
        prompt: str | Sequence[int] | list[dict[str, str]],
        *,
        max_tokens: int = 24,
        call_id: str = "",
        epoch: int = 0,
        seed: int = 11,
        resume: tuple[tuple[int, ...], ...] = (),
        spans: tuple[tuple[int, int], ...] = (),
        prefix_key: str = "",
        prompt_chunk: int = 256,
        check: tuple[int, ...] = (),
        check_choice: int = 0,
        **body: Any,
    ) -> calls.GenerateCall:
        call_id = call_id or f"call-{secrets.token_hex(8)}"
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        shown: dict[str, Any] = {"messages": prompt} if chat else {"prompt": prompt}
        return calls.GenerateCall(
            call_id=call_id,
            epoch=epoch,
            kind="chat" if chat else "completion",
            model="smollm2",
            request={"model": "smollm2", "temperature": 0.0, **shown, **body},
            ticket=self.ticket(call_id, epoch, stages),
            seed=seed,
            max_tokens=max_tokens,
            prefix_key=prefix_key or call_id,
            resume=resume,
            spans=spans,
            prompt_chunk=prompt_chunk,
            check=check,
            check_choice=check_choice,
        )

    async def run(
        self,
        nodes: Sequence[BenchNode] | Sequence[RouteStage],
        prompt: Any,
        *,
        on_event: Callable[[Call, calls.AnyEvent], Any] | None = None,
        **options: Any,
    ) -> Answer:
        """A call from its beginning to its end."""
        stages = [node.stage() if isinstance(node, BenchNode) else node for node in nodes]
        head = next(node for node in self.nodes if node.node_id == stages[0].node_id)
        request = self.request(stages, prompt, **options)
        call = await head.heads.start(request)
        return await self.follow(call, on_event)

    async def follow(
        self, call: Call, on_event: Callable[[Call, calls.AnyEvent], Any] | None = None
    ) -> Answer:
        answer = Answer()
        while events := await call.events.take():
            for event in events:
                answer.events.append(event)
                if on_event is not None:
                    found = on_event(call, event)
                    if asyncio.iscoroutine(found):
                        await found
        return answer

    async def settled(self, *, seconds: float = 6.0) -> None:
        """Waits until no node holds anything for a call."""
        deadline = time.monotonic() + seconds
        alive = [node for node in self.nodes if not node.dead]
        while any(node.held or node.stages.sessions or len(node.heads) for node in alive):
            held = {n.node_id: (n.held, list(n.stages.sessions), len(n.heads)) for n in alive}
            assert time.monotonic() < deadline, f"still held: {held}"
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for node in self.nodes:
            if node.dead:
                continue
            await node.heads.stop()
            for session in list(node.stages.sessions.values()):
                node.stages.discard(session)
            await node.links.stop()
            await node.server.stop(0)
            for shard in node.stages.shards:
                await node.stages.executor.call(shard.engine.unload)
            node.stages.executor.stop()
            node.stages.executor.join(5.0)
        for model in self._models:
            model.close()


def replace_struct(ticket: Ticket, changes: dict[str, Any]) -> Ticket:
    values = {name: getattr(ticket, name) for name in ticket.__struct_fields__}
    return Ticket(**{**values, **changes})
