"""A tracker's HTTP face with scripted answers, for what a real mesh cannot be asked to do on demand: ten
thousand tokens at once, an error in the middle of a stream, a connection cut, two hundred calls.

`python -m web.scripted --port 8099`, run in tests/, serves the built dashboard on it. The last word of a
chat message picks the script (see scripts.py); everything else is answered from small tables. Routes are
planned by meshnet.routing, so what the Routing tab shows is what the tracker would answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from web.scripted_books import BOOKS
from web.scripts import SCRIPTS, Script

from meshnet.routing import (
    Link,
    MeasuredCost,
    NodeState,
    NodeTimes,
    RouteWeights,
    RoutingRequest,
    WeightedCost,
    plan,
)

DIST = Path(__file__).parents[2] / "src" / "meshnet" / "web" / "dist"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ADMIN_KEY, USE_KEY = "mn-scripted-admin", "mn-scripted-use"
MODEL = "smollm2-135m-instruct"
LAYERS = 30


def now_ms() -> int:
    return int(time.time() * 1000)


def node(name: str, first: int, last: int, rate: float, **more: Any) -> dict[str, Any]:
    """A node as docs/api.md shows it."""
    shard = {
        "model": MODEL,
        "fingerprint": "f1",
        "start_layer": first,
        "end_layer": last,
        "model_layers": LAYERS,
        "entry_layers": [first],
        "state": "ready",
        "progress": 1.0,
        "free_slots": 6,
        "n_slots": 8,
        "n_ctx": 4096,
        "memory_bytes": 60_000_000,
        "times": {"decode_ms_per_layer": round(1000 / rate / LAYERS, 4)},
    }
    value = {
        "node_id": f"id-{name}",
        "name": name,
        "ready": True,
        "alive": True,
        "state": "ready",
        "hardware": {
            "name": "Mac mini",
            "os": "macOS 26",
            "cores": 8,
            "memory_bytes": 16_000_000_000,
            "device": "cpu",
        },
        "http_url": "http://127.0.0.1:7000",
        "grpc_address": "127.0.0.1:7001",
        "served_layers": [[first, last]],
        "shards": [shard],
        "latency_ms": round(1000 / rate, 2),
        "current_load": 0.25,
        "capacity_score": rate,
        "memory_free_bytes": 9_100_000_000,
        "memory_limit_bytes": 12_000_000_000,
        "numerics_class": "x86-avx2",
        "versions": {"meshnet": "0.1.0", "engine": "2026.10"},
        "trust": 0.62 if name == "cellar" else 1.0,
        "served_requests": 812,
        "failed_requests": 0,
        "joined_ms": now_ms() - 3_600_000,
        "last_seen_ms": now_ms(),
        "problems": [],
    }
    return {**value, **more}


def served(name: str, state: str, progress: float) -> dict[str, Any]:
    """A model of `GET /api/placement`."""
    return {"id": name, "state": state, "asked": True, "progress": progress, "reason": None, "why": []}


class ScriptedTracker:
    """The state that the page sees, and the HTTP application over it."""

    def __init__(self, *, gap: bool = False) -> None:
        self.served = {MODEL: served(MODEL, "ready", 1.0)}
        self.nodes = {
            n["node_id"]: n
            for n in (
                node("attic", 0, 14, 210.0),
                node("cellar", 15, 29, 160.0, current_load=0.62),
                node(
                    "laptop",
                    8,
                    21,
                    95.0,
                    hardware={"name": "ThinkPad X1", "os": "Linux 6.12", "cores": 8, "device": "cpu"},
                ),
                node("workshop", 0, 29, 42.0, current_load=0.97, problems=["on battery: new calls avoid it"]),
            )
        }
        if gap:
            del self.nodes["id-cellar"]
            del self.nodes["id-workshop"]
        self.calls: dict[str, dict[str, Any]] = {}
        self.timelines: dict[str, list[dict[str, Any]]] = {}
        self.console: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {
            "default": {"cost_model": "measured", "weights": RouteWeights().to_dict()},
            "models": {},
        }
        self.viewers: set[asyncio.Queue[tuple[str, Any] | None]] = set()
        self.silent_until = 0.0
        self.stopped_streams = 0
        self.numbers = itertools.count(1)
        self.base = ""
        """Where it serves, once it does."""
        self.app = web.Application(client_max_size=8 << 20)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._routes()

    # ------------------------------------------------------------ serving

    async def start(self, port: int = 0) -> str:
        """Serves on 127.0.0.1; returns the base URL."""
        self._runner = web.AppRunner(self.app, shutdown_timeout=0.2, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.drop_viewers()
        if self._runner is not None:
            await self._runner.cleanup()

    def drop_viewers(self, silence_s: float = 0.0) -> None:
        """Ends all event streams and answers none for a while."""
        self.silent_until = time.monotonic() + silence_s
        for viewer in self.viewers:
            viewer.put_nowait(None)

    def background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _routes(self) -> None:
        add = self.app.router.add_route
        add("GET", "/dashboard", self._page)
        add("GET", "/dashboard/{path:.*}", self._page)
        add("POST", "/api/session", self._sign_in)
        add("GET", "/api/session", self._guarded(self._who))
        add("DELETE", "/api/session", self._sign_out)
        add("GET", "/api/events", self._guarded(self._events))
        add("GET", "/api/calls/{id}", self._guarded(self._call))
        add("DELETE", "/api/calls/{id}", self._guarded(self._cancel))
        add("POST", "/api/route/preview", self._guarded(self._preview))
        add("*", "/api/settings/routing", self._guarded(self._routing))
        add("POST", "/api/invite", self._guarded(self._invite))
        add("GET", "/api/placement", self._guarded(self._placement))
        add("POST", "/api/models", self._guarded(self._load_model))
        add("DELETE", "/api/models/{id}", self._guarded(self._unload_model))
        add("*", "/api/nodes/{id}/drain", self._guarded(self._drain))
        add("POST", "/v1/chat/completions", self._guarded(self._chat))
        add("POST", "/scripted/calls", self._guarded(self._burst))
        for path, answer in BOOKS.items():
            add("GET", path, self._guarded(self._table(answer)))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        path = DIST / request.match_info.get("path", "")
        if not path.is_file():
            path = DIST / "index.html"
        response = web.FileResponse(path)
        response.headers["Content-Security-Policy"] = CSP
        response.headers["Cache-Control"] = "no-store"
        return response

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if scope_of(request) is None:
                return refused(401, "invalid_api_key", "sign in first")
            return await handler(request)

        return guarded

    # ------------------------------------------------------------ sessions

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        key = (await request.json()).get("key")
        if key not in (ADMIN_KEY, USE_KEY):
            return refused(401, "invalid_api_key", "this key is not known here")
        scope = "admin" if key == ADMIN_KEY else "use"
        response = web.json_response({"scope": scope, "name": f"{scope} key"})
        response.set_cookie("meshnet_session", scope, httponly=True, samesite="Strict", path="/")
        return response

    async def _who(self, request: web.Request) -> web.StreamResponse:
        scope = scope_of(request)
        return web.json_response({"scope": scope, "name": f"{scope} key"})

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        response = web.json_response({})
        response.del_cookie("meshnet_session", path="/")
        return response

    def _table(self, answer: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def table(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer)

        return table

    # ------------------------------------------------------------ the event stream

    def models(self) -> list[dict[str, Any]]:
        replicas = [0] * LAYERS
        for n in self.nodes.values():
            for shard in n["shards"]:
                if n["ready"] and shard["state"] == "ready":
                    for layer in range(shard["start_layer"], shard["end_layer"] + 1):
                        replicas[layer] += 1
        gaps: list[list[int]] = []
        for layer, copies in enumerate(replicas):
            if copies == 0:
                if gaps and gaps[-1][1] == layer - 1:
                    gaps[-1][1] = layer
                else:
                    gaps.append([layer, layer])
        fill = (
            f"meshnet node --model {MODEL} --layers {gaps[0][0]}-{gaps[0][1]} --join mn://…" if gaps else None
        )
        return [
            {
                "id": MODEL,
                "name": "SmolLM2 135M Instruct",
                "aliases": [],
                "fingerprint": "f1",
                "arch": "llama",
                "layers": LAYERS,
                "n_ctx": 8192,
                "quantisation": "Q4_1",
                "bytes": 98_000_000,
                "complete": not gaps,
                "gaps": gaps,
                "replicas": replicas,
                "tools": False,
                "cost_model": "measured",
                "default": True,
                "fill_command": fill,
            }
        ]

    def push(self, kind: str, value: dict[str, Any]) -> None:
        """An upsert to everyone who watches."""
        if kind == "call":
            self.calls[value["id"]] = value
        for viewer in self.viewers:
            viewer.put_nowait(("upsert", {"kind": kind, "value": value}))

    def log(self, event: str, line: str, call_id: str | None = None, level: str = "info") -> None:
        entry = {"seq": len(self.console) + 1, "ms": now_ms(), "level": level, "event": event, "line": line}
        if call_id is not None:
            entry["call_id"] = call_id
        self.console.append(entry)
        self.push("console", entry)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if time.monotonic() < self.silent_until:
            return refused(503, "unavailable", "not now")
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-store"}
        )
        await response.prepare(request)
        admin = scope_of(request) == "admin"
        outbox: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        snapshot = {
            "calls": list(self.calls.values()),
            "nodes": list(self.nodes.values()) if admin else [],
            "models": self.models(),
            "console": self.console[-2000:],
            "seq": next(self.numbers),
        }
        outbox.put_nowait(("snapshot", snapshot))
        self.viewers.add(outbox)
        try:
            while (item := await outbox.get()) is not None:
                pieces = [item]
                while not outbox.empty():
                    following = outbox.get_nowait()
                    if following is None:
                        return response
                    pieces.append(following)
                await response.write(
                    b"".join(
                        f"id: {next(self.numbers)}\nevent: {event}\ndata: {json.dumps(value)}\n\n".encode()
                        for event, value in pieces
                        if admin or value.get("kind") != "node"
                    )
                )
        finally:
            self.viewers.discard(outbox)
        return response

    # ------------------------------------------------------------ calls

    def new_call(self, **more: Any) -> dict[str, Any]:
        number = next(self.numbers)
        call: dict[str, Any] = {
            "id": f"c{number:06d}",
            "request_id": f"r{number}",
            "model": MODEL,
            "key": "home",
            "kind": "chat",
            "stream": True,
            "phase": "accepted",
            "stages": [],
            "prompt_tokens": 24,
            "prefill_done": 0,
            "output_tokens": 0,
            "tokens_per_second": 0.0,
            "ttft_ms": None,
            "queue_position": None,
            "accepted_ms": now_ms(),
            "ended_ms": None,
            "elapsed_ms": 0.0,
            "finish_reason": None,
            "error": None,
            "reroutes": 0,
            "degraded": False,
            "numerics_changed": False,
        }
        call.update(more)
        self.timelines[call["id"]] = []
        self.change(call, phase="accepted")
        return call

    def change(self, call: dict[str, Any], **change: Any) -> None:
        """Changes a call in place and publishes a copy; a new phase is noted in its timeline."""
        noted = change.get("phase")
        call.update(change)
        call["elapsed_ms"] = float(now_ms() - call["accepted_ms"])
        if noted in ("complete", "cancelled", "failed"):
            call["ended_ms"] = now_ms()
        if noted is not None:
            detail = {"stages": [dict(s) for s in call["stages"]]} if noted == "route_selected" else {}
            self.timelines[call["id"]].append({"ms": call["elapsed_ms"], "event": noted, "detail": detail})
        self.push("call", json.loads(json.dumps(call)))

    def stages(self, *parts: tuple[str, int, int]) -> list[dict[str, Any]]:
        return [
            {
                "node_id": f"id-{name}",
                "name": name,
                "start_layer": first,
                "end_layer": last,
                "compute_ms": 0.0,
                "queue_ms": 0.0,
                "link_ms": 0.0,
                "tokens": 0,
            }
            for name, first, last in parts
        ]

    async def _call(self, request: web.Request) -> web.StreamResponse:
        call = self.calls.get(request.match_info["id"])
        if call is None:
            return refused(404, "unknown_call", f"there is no call {request.match_info['id']!r}")
        return web.json_response({**call, "timeline": self.timelines.get(call["id"], [])})

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        call = self.calls.get(request.match_info["id"])
        if call is None:
            return refused(404, "unknown_call", f"there is no call {request.match_info['id']!r}")
        self.change(call, phase="cancelled")
        return web.json_response({"id": call["id"], "phase": "cancelled"})

    async def run_call(self, tokens: int, interval_s: float, **more: Any) -> None:
        """A call that the wall shows from acceptance to its end, with four updates a second."""
        call = self.new_call(**more)
        await asyncio.sleep(random.uniform(0.05, 0.4))
        split = random.choice(
            [
                (("attic", 0, 14), ("cellar", 15, 29)),
                (("attic", 0, 9), ("laptop", 10, 21), ("cellar", 22, 29)),
                (("workshop", 0, 29),),
            ]
        )
        self.change(call, phase="route_selected", stages=self.stages(*split))
        self.log("proxy route selected", " > ".join(f"{n}[{a}-{b}]" for n, a, b in split), call["id"])
        self.change(call, phase="generating", prefill_done=24, ttft_ms=84.0)
        done, begun = 0, time.monotonic()
        while done < tokens:
            await asyncio.sleep(0.25)
            done = min(tokens, done + max(1, int(0.25 / interval_s)))
            for stage in call["stages"]:
                stage["compute_ms"] += random.uniform(20, 90)
                stage["link_ms"] += random.uniform(2, 12)
                stage["tokens"] = done
            rate = round(done / (time.monotonic() - begun), 1)
            self.change(call, output_tokens=done, tokens_per_second=rate)
        self.change(call, phase="complete", finish_reason="stop")
        self.log("proxy complete", f"{tokens} tokens", call["id"])

    async def _burst(self, request: web.Request) -> web.StreamResponse:
        """Starts many calls at once, for the benchmark: `{"calls", "tokens"}`."""
        body = await request.json()
        for number in range(body["calls"]):
            self.background(self.run_call(body["tokens"], 0.02, key=f"key {number % 7}"))
        return web.json_response({})

    # ------------------------------------------------------------ routing, nodes, invitations

    async def _preview(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        states, times = [], {}
        for n in self.nodes.values():
            served = tuple((s["start_layer"], s["end_layer"]) for s in n["shards"])
            states.append(
                NodeState(
                    node_id=n["node_id"],
                    latency_ms=n["latency_ms"],
                    current_load=n["current_load"],
                    capacity_score=n["capacity_score"],
                    served_layers=served,
                    alive=n["alive"],
                    mid_shard_entry=True,
                )
            )
            per_layer = 1000 / n["capacity_score"] / LAYERS
            times[n["node_id"]] = NodeTimes(
                decode_ms_per_layer=per_layer,
                prefill_ms_per_token_layer=per_layer / 9,
                embed_ms=0.05,
                output_ms=0.6,
                free_slots=4,
                free_kv_tokens=90_000,
                queue_ms=n["current_load"] * 20,
            )
        pairs = itertools.permutations(times, 2)
        links = {pair: Link(ms=0.9, bytes_per_s=1e8) for pair in pairs}
        model = (
            WeightedCost(RouteWeights.from_dict(body.get("weights") or {}))
            if body.get("cost_model") == "weighted"
            else MeasuredCost(times, links, token_bytes=4 * 576)
        )
        wanted = RoutingRequest((0, LAYERS - 1), body["prompt_tokens"], body["expected_tokens"])
        found = plan(wanted, states, model, alternatives=body.get("alternatives", 3), model=MODEL)
        return web.json_response(found.to_dict())

    async def _routing(self, request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            body = await request.json()
            self.settings["default"].update(body.get("default", {}))
            for name, choice in body.get("models", {}).items():
                self.settings["models"].setdefault(name, {}).update(choice)
        return web.json_response(self.settings)

    async def _invite(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        expires = now_ms() + body["expires_s"] * 1000
        return web.json_response(
            {
                "join_link": "mesh://127.0.0.1:8081/scripted",
                "command": "meshnet node --join mesh://127.0.0.1:8081/scripted#mj-1234567890",
                "token": "mj-1234567890",
                "expires_ms": expires,
            }
        )

    async def _placement(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"models": list(self.served.values()), "moves": [], "default": MODEL, "aliases": {}}
        )

    async def _load_model(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["model"]
        self.served[name] = served(name, "reading", 0.4)
        return web.json_response({"id": name}, status=202)

    async def _unload_model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        del self.served[name]
        return web.json_response({"id": name, "held_by": []})

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        n = self.nodes[request.match_info["id"]]
        draining = request.method == "POST"
        n.update(state="draining" if draining else "ready", ready=not draining)
        self.push("node", n)
        for model in self.models():
            self.push("model", model)
        self.log("node draining" if draining else "node ready", n["name"])
        return web.json_response(n)

    # ------------------------------------------------------------ chat

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = body["messages"][-1]["content"]
        script = SCRIPTS.get(asked.split()[-1], Script())
        if script.status is not None:
            return refused(script.status, "no_route", "no complete route: layers 15-29 are on no ready node")
        call = self.new_call(stream=body.get("stream", False))
        headers = {"x-meshnet-call": call["id"], "cache-control": "no-store"}
        stages = self.stages(("attic", 0, 14), ("cellar", 15, 29))
        if not body.get("stream"):
            self.change(call, phase="generating", stages=stages)
            await asyncio.sleep(0.4)
            self.change(call, phase="complete", output_tokens=7, finish_reason="stop")
            usage = {"prompt_tokens": 24, "completion_tokens": 7, "total_tokens": 31}
            message = {"role": "assistant", "content": "An answer in one piece."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage}, headers=headers)
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, call, stages, script)
        except (ConnectionError, asyncio.CancelledError):
            self.stopped_streams += 1
            self.change(call, phase="cancelled")
            raise
        if script.cut and request.transport is not None:
            request.transport.abort()
        return response

    async def _stream(
        self, response: web.StreamResponse, call: dict[str, Any], stages: list[dict[str, Any]], script: Script
    ) -> None:
        async def send(value: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(value)}\n\n".encode())

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        for place in range(script.queue, 0, -1):
            self.change(call, phase="queued", queue_position=place)
            await response.write(f": queued {place}\n\n".encode())
            await asyncio.sleep(0.4)
        self.change(call, phase="route_selected", stages=stages, queue_position=None)
        if script.prefill:
            for done in range(0, 2048, 256):
                self.change(call, phase="prefill", prompt_tokens=2048, prefill_done=done)
                await asyncio.sleep(0.12)
        await send(chunk({"role": "assistant", "content": ""}))
        self.change(call, phase="generating", ttft_ms=62.0)
        begun = time.monotonic()
        told = sent = 0
        batch: list[bytes] = []
        async for piece in script.pieces():
            sent += 1
            batch.append(f"data: {json.dumps(chunk({'content': piece}))}\n\n".encode())
            if len(batch) >= script.burst:
                await response.write(b"".join(batch))
                batch.clear()
            if time.monotonic() - begun > told * 0.25:
                told += 1
                rate = round(sent / (time.monotonic() - begun + 1e-9), 1)
                self.change(call, output_tokens=sent, tokens_per_second=rate)
        if batch:
            await response.write(b"".join(batch))
        for stage in stages:
            stage.update(compute_ms=120.0 + 40 * stage["start_layer"] / 15, link_ms=9.0, tokens=sent)
        rate = round(sent / (time.monotonic() - begun + 1e-9), 1)
        if script.error:
            error = {
                "message": "node cellar was lost and nothing can stand in",
                "type": "server_error",
                "code": "route_lost",
            }
            self.change(call, phase="failed", error={"code": error["code"], "message": error["message"]})
            self.log("proxy failed", error["message"], call["id"], "error")
            await send({"error": error})
        elif script.cut:
            self.change(call, phase="failed", output_tokens=sent)
            return
        else:
            self.change(
                call, phase="complete", output_tokens=sent, tokens_per_second=rate, finish_reason="stop"
            )
            await send(chunk({}, "stop"))
            usage = {"prompt_tokens": 24, "completion_tokens": sent, "total_tokens": 24 + sent}
            await send({"choices": [], "usage": usage})
        if script.done:
            await response.write(b"data: [DONE]\n\n")


def scope_of(request: web.Request) -> str | None:
    scope = request.cookies.get("meshnet_session")
    return scope if scope in ("admin", "use") else None


def refused(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return web.json_response({"error": error}, status=status)


async def demonstrate(tracker: ScriptedTracker, calls: int) -> None:
    """Keeps some calls on the wall until cancelled."""
    keys = itertools.cycle(["home", "phone", "backup job"])
    while True:
        running = sum(1 for call in tracker.calls.values() if call["ended_ms"] is None)
        if running < calls:
            tracker.background(
                tracker.run_call(random.randint(30, 400), 0.02, key=next(keys), stream=random.random() < 0.7)
            )
        await asyncio.sleep(0.3)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--calls", type=int, default=3, help="calls to keep on the wall")
    parser.add_argument("--gap", action="store_true", help="leave layers without a node")
    options = parser.parse_args()
    tracker = ScriptedTracker(gap=options.gap)
    base = await tracker.start(options.port)
    print(f"{base}/dashboard#key={ADMIN_KEY}", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await demonstrate(tracker, options.calls)


if __name__ == "__main__":
    asyncio.run(main())
