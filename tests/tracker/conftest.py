"""A real tracker on real sockets, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tracker.wire_node import WireNode

from meshnet.tracker.server import Server
from meshnet.tracker.settings import TrackerSettings


@dataclass
class Running:
    """A tracker, its keys, and a client session (which sends the use key unless told otherwise)."""

    server: Server
    base: str
    grpc: str
    use_key: str
    admin_key: str
    join_token: str
    http: aiohttp.ClientSession
    nodes: list[WireNode]

    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.admin_key}"}

    def use(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.use_key}"}

    async def node(self, **options: Any) -> WireNode:
        """A node that has joined and been proven."""
        node = WireNode(self.join_token, **options)
        self.nodes.append(node)
        await node.start(self.grpc)
        assert node.refused is None, node.refused
        await self.wait_ready(node)
        return node

    async def wait_ready(self, node: WireNode) -> None:
        await self.until(lambda: self.state(node) == "ready")

    def state(self, node: WireNode) -> str:
        assert self.server.tracker is not None
        roster = self.server.tracker.roster
        known = roster.state.nodes.get(node.node_id)
        return "unknown" if known is None else known.status(roster.clock())

    def prefill_of(self, node: WireNode) -> float:
        assert self.server.tracker is not None
        return self.server.tracker.roster.state.nodes[node.node_id].shards[0].times.prefill_ms_per_token_layer

    async def drain(self, node: WireNode, *, on: bool = True) -> None:
        url = f"{self.base}/api/nodes/{node.node_id}/drain"
        async with self.http.request("POST" if on else "DELETE", url, headers=self.admin()) as answer:
            assert answer.status == 200

    async def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        import asyncio

        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def get(self, path: str, *, admin: bool = True) -> Any:
        async with self.http.get(self.base + path, headers=self.admin() if admin else self.use()) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def chat(self, *, headers: dict[str, str] | None = None, **body: Any) -> aiohttp.ClientResponse:
        """Posts a chat request; a streamed answer is the caller's to read, another one is read already."""
        request = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], **body}
        answer = await self.http.post(
            f"{self.base}/v1/chat/completions", json=request, headers={**self.use(), **(headers or {})}
        )
        if not body.get("stream"):
            await answer.read()
        return answer


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(**settings)` gives a running tracker; all are stopped at the end."""
    running: list[Running] = []

    async def begin(data: Path | None = None, secrets: Running | None = None, **settings: Any) -> Running:
        values: dict[str, Any] = {"port": 0, "grpc_port": 0, "data": data or tmp_path / "data", **settings}
        server = Server(TrackerSettings(**values))
        started = await server.start()
        made = started.secrets
        tracker = Running(
            server=server,
            base=f"http://127.0.0.1:{started.http_port}",
            grpc=f"127.0.0.1:{started.grpc_port}",
            use_key=made.use_key if made else secrets.use_key if secrets else "",
            admin_key=made.admin_key if made else secrets.admin_key if secrets else "",
            join_token=made.join_token if made else secrets.join_token if secrets else "",
            http=aiohttp.ClientSession(),
            nodes=[],
        )
        running.append(tracker)
        return tracker

    yield begin
    for tracker in running:
        await tracker.http.close()
        for node in tracker.nodes:
            await node.stop()
        await tracker.server.stop()


@pytest.fixture
async def tracker(start: Start) -> Running:
    return await start()


def events_of(text: str) -> list[str]:
    """The data of an SSE body's events, without comments."""
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]
