"""What benchmarks of whole meshes share: pinned nodes, llama.cpp's own server, and a light client.

Everything runs as real processes on loopback. Client and tracker are not pinned: they share the cores with
the nodes, and `cpu_seconds` says what they took.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from figures import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support.mesh import run_mesh

from meshnet.commands.demo import auto_cuts
from meshnet.models.store import Store

MODEL = "smollm2"
ANIMALS = ("fox", "owl", "bear", "whale", "otter", "heron", "lynx", "crab", "wolf", "seal", "hare", "mole")
CONTENT = re.compile(rb'"(?:content|text)": ?"[^"]|"finish_reason": ?"')
"""What the first token shows: text, or an answer that ends with it."""
ENDS = ("0", "2")
"""SmolLM2's tokens that end a text."""
USAGE = re.compile(rb'"prompt_tokens": ?(\d+)')
USED = re.compile(rb'"completion_tokens": ?(\d+)')
SERVER = """
import json, sys, threading, xllamacpp
path, port, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:6])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = path, port, slots
params.n_ctx, params.n_threads_http = slots * context, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(json.dumps({"base_url": server.listening_address + "/v1"}), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Endpoint:
    """Something that answers OpenAI requests. `pids` by what they are, for CPU time and memory."""

    name: str
    base_url: str
    key: str = ""
    pids: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A node to start: its layers, threads, and the cores that compute is bound to."""

    layers: str
    cores: str = ""
    threads: int = 1
    arguments: tuple[str, ...] = ("--no-drafts",)
    """Without drafts, what is compared is steps, whatever the text; `links.py` shows what drafts bring."""

    def options(self) -> list[str]:
        pinned = ["--cores", self.cores] if self.cores else []
        return ["--threads", str(self.threads), *pinned, *self.arguments]


@contextmanager
def mesh(name: str, folder: Path, nodes: Sequence[Node], *tracker: str) -> Iterator[Endpoint]:
    """A tracker and these nodes, ready."""
    folder.mkdir(parents=True, exist_ok=True)
    with run_mesh(folder, model=MODEL) as running:
        running.start_tracker(*tracker)
        for index, node in enumerate(nodes):
            running.start_node(f"node{index}", node.layers, *node.options())
        running.wait_ready()
        assert running.tracker is not None
        pids = {"tracker": running.tracker.pid, **{n: p.pid for n, p in running.nodes.items()}}
        yield Endpoint(name, str(running.info["base_url"]), str(running.info["api_key"]), pids)


@contextmanager
def llama_server(cores: str, threads: int, slots: int, context: int = 2048) -> Iterator[Endpoint]:
    """llama.cpp's server from the wheel that the engine uses, all its threads on `cores` where given."""
    path = Store().resolve(MODEL).path
    port = free_port()
    pinned = ["taskset", "-c", cores] if cores else []
    process = subprocess.Popen(
        [*pinned, sys.executable, "-c", SERVER, str(path), *map(str, (port, threads, slots, context))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"base_url"'):
                yield Endpoint("llama.cpp", json.loads(line)["base_url"], pids={"server": process.pid})
                return
        raise RuntimeError(f"llama.cpp's server ended with {process.wait()} before it was ready")
    finally:
        process.kill()
        process.communicate()


def two_cores() -> tuple[str, str]:
    """The cores that pinned nodes get. Raises SystemExit on a machine with one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark pins nodes to two cores; this process may use one")
    return str(cores[0]), str(cores[1])


@contextmanager
def interleaved(*made: AbstractContextManager[Endpoint]) -> Iterator[list[Endpoint]]:
    """Several endpoints at once, so that what is compared can take turns."""
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in made]


@dataclass
class Answer:
    """One streamed answer; times in seconds of one clock, `first` and `last` of content."""

    begun: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt: int = 0
    tokens: int = 0
    text: bytes = b""
    error: str = ""

    @property
    def first_ms(self) -> float:
        return (self.first - self.begun) * 1e3

    @property
    def rate(self) -> float:
        """Decode tokens per second after the first."""
        return (self.tokens - 1) / (self.last - self.first)


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, done: asyncio.Future[Answer]) -> None:
        self._request, self._done = request, done
        self._answer = Answer()
        self._all = bytearray()
        self._looked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._answer.begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._all += data
        # The end of what came before is looked at again: what is searched for may be cut.
        if CONTENT.search(self._all, max(self._looked - 64, 0)):
            self._answer.last = now
            self._answer.first = self._answer.first or now
        self._looked = len(self._all)
        if b"data: [DONE]" in self._all[-64:]:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        self._transport.close()
        if self._done.done():
            return
        answer, text = self._answer, bytes(self._all)
        used, given = USED.findall(text), USAGE.findall(text)
        if used and given and answer.first:
            answer.tokens, answer.prompt = int(used[-1]), int(given[-1])
        else:
            answer.error = text[:600].decode("utf-8", "replace") or "the connection was closed"
        answer.text = text
        self._done.set_result(answer)


def request_of(endpoint: Endpoint, messages: Sequence[dict[str, str]], tokens: int, **extra: object) -> bytes:
    """A streamed greedy chat request."""
    return _post(endpoint, "/chat/completions", tokens, messages=list(messages), **extra)


def completion_of(endpoint: Endpoint, prompt: str, tokens: int) -> bytes:
    """A streamed greedy request to go on with a text, which nothing ends before its tokens are used up."""
    return _post(endpoint, "/completions", tokens, prompt=prompt, logit_bias=dict.fromkeys(ENDS, -100))


def _post(endpoint: Endpoint, path: str, tokens: int, **extra: object) -> bytes:
    parts = urlsplit(endpoint.base_url)
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    encoded = json.dumps(body).encode()
    key = f"authorization: Bearer {endpoint.key}\r\n" if endpoint.key else ""
    head = (
        f"POST {parts.path}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}"
        f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + encoded


def story(index: int) -> list[dict[str, str]]:
    """A prompt whose greedy answer is long; another for each index."""
    animal = ANIMALS[index % len(ANIMALS)]
    return [{"role": "user", "content": f"Write a very long story about a {animal} and the sea."}]


def ask(endpoint: Endpoint, requests: Sequence[bytes]) -> list[Answer]:
    """All requests at once. Raises RuntimeError where one fails: figures with failures say nothing."""

    async def one(request: bytes) -> Answer:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer] = loop.create_future()
        parts = urlsplit(endpoint.base_url)
        await loop.create_connection(lambda: _Stream(request, done), parts.hostname or "", parts.port or 80)
        return await done

    async def everyone() -> list[Answer]:
        return list(await asyncio.gather(*(one(request) for request in requests)))

    answers = asyncio.run(everyone())
    for answer in answers:
        if answer.error:
            raise RuntimeError(f"{endpoint.name}: {answer.error}")
    return answers


def decode_rate(endpoint: Endpoint, tokens: int, streams: int = 1) -> float:
    """Aggregate decode tokens per second, from the first token of the first stream to the last of all."""
    answers = ask(endpoint, [request_of(endpoint, story(i), tokens) for i in range(streams)])
    first, last = min(a.first for a in answers), max(a.last for a in answers)
    return sum(a.tokens - 1 for a in answers) / (last - first)


def words(count: int, seed: int) -> str:
    """A text of so many words, another one for each seed from its first word on, so that no cache has it."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(ANIMALS) for _ in range(count))


def content_of(answer: Answer) -> str:
    """The text of a streamed answer."""
    parts = []
    for line in answer.text.split(b"\n"):
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices", ())
            parts += [choice["delta"].get("content") or "" for choice in choices]
    return "".join(parts)


def proposed_cut(streams: int) -> int:
    """Where `meshnet demo --cuts auto --streams N` would cut the model for two nodes."""
    (cut,) = auto_cuts("auto", Store().open(MODEL), streams)
    return cut


def halves(cut: int, layers: int = 30) -> tuple[str, str]:
    """The layers of two nodes."""
    return f"0-{cut - 1}", f"{cut}-{layers - 1}"


def free_port() -> int:
    """A port that nobody has right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by kind: Rss, Pss, Anonymous, as the kernel rolls them up."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            found[name] = int(value.split()[0]) * 1024
    return found
