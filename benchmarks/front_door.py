"""What the front door costs: added time to the first token, and streamed events per CPU second.

A fake node that emits at once and then every 20 ms is asked directly (its own OpenAI endpoint), through
the tracker with free calls, through the tracker with calls that cost money (reserved and settled in
SQLite), and, where it is installed, through LiteLLM's proxy; interleaved, in one run. Then the same with an
upstream that writes as fast as it is read, for events per CPU second.

LiteLLM lives in an environment of its own: `python -m venv E; E/bin/pip install 'litellm[proxy]'`, then
`--litellm E/bin/litellm` (or MESHNET_BENCH_LITELLM). Without it, its rows are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import uvloop
from figures import ROOT, Table, parser
from streams import Burst, Target, burst

LITELLM_KEY = "sk-bench"
FAST_STREAMS = 8


@dataclass
class Proxy:
    """Something between client and fake node, with the process whose CPU time counts."""

    target: Target
    pid: int
    bursts: dict[int, list[Burst]] = field(default_factory=dict)
    rates: list[tuple[float, float]] = field(default_factory=list)
    """(events per CPU second, events per second) of each unthrottled round."""
    paced: list[float] = field(default_factory=list)
    """Events per CPU second of each round in which tokens come one by one; all else of a call included."""


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    with_children = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in with_children)


def ask(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as answer:
        return json.load(answer)


@contextlib.contextmanager
def process(arguments: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        started = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env={**os.environ, **env}
        )
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
            assert started.stdout is not None
            started.stdout.close()


def first_line(started: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    assert started.stdout is not None
    line = started.stdout.readline()
    if not line:
        raise SystemExit(f"{log.stem} ended: {log.read_text()[-2000:]}")
    values: dict[str, Any] = json.loads(line)
    return values


def wait_ready(url: str, seconds: float) -> None:
    """Until the address answers 200."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} is not ready: {error}") from error
        time.sleep(0.2)


@contextlib.contextmanager
def litellm(executable: str, upstream: str, folder: Path) -> Iterator[Proxy | None]:
    """LiteLLM's proxy before the same fake node; None where it is not installed."""
    if not executable or not Path(executable).exists():
        sys.stderr.write("LiteLLM is not installed (see --help): its rows are left out\n")
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": upstream, "api_key": "none"},
        }
        for name in ("fake", "fake-fast")
    ]
    config = folder / "litellm.json"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": LITELLM_KEY}}))
    arguments = [executable, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    log = folder / "litellm.log"
    with process(
        [*arguments, "--num_workers", "1"], log, LITELLM_LOG="ERROR", NO_PROXY="*", LITELLM_TELEMETRY="False"
    ) as started:
        wait_ready(f"http://127.0.0.1:{port}/health/liveliness", 90)
        yield Proxy(Target("LiteLLM", f"http://127.0.0.1:{port}/v1", LITELLM_KEY), started.pid)


async def measure(
    arguments: argparse.Namespace, direct: list[Burst], proxies: list[Proxy], base: Target, streams: int
) -> None:
    """Interleaved rounds at one number of streams."""
    stagger = arguments.tokens * arguments.interval_ms / 1000
    for _ in range(arguments.repeats):
        direct.append(await round_of(arguments, base, streams, stagger))
        for proxy in proxies:
            before = cpu_seconds(proxy.pid)
            made = await round_of(arguments, proxy.target, streams, stagger)
            proxy.paced.append(made.events / (cpu_seconds(proxy.pid) - before))
            proxy.bursts.setdefault(streams, []).append(made)


async def round_of(arguments: argparse.Namespace, target: Target, streams: int, stagger: float) -> Burst:
    made = await burst(target, streams, arguments.requests, arguments.tokens, stagger)
    made.check(target.name)
    return made


async def flood(arguments: argparse.Namespace, proxies: list[Proxy]) -> None:
    """Unthrottled rounds: CPU seconds of the proxy's processes against the events that came out of it."""
    for _ in range(arguments.repeats):
        for proxy in proxies:
            target = proxy.target
            fast = Target(target.name, target.base_url, target.key, "fake-fast")
            tokens = arguments.fast_tokens if target.name != "LiteLLM" else arguments.fast_tokens // 10
            before = cpu_seconds(proxy.pid)
            made = await burst(fast, FAST_STREAMS, 1, tokens, 0.0)
            made.check(target.name)
            spent = cpu_seconds(proxy.pid) - before
            proxy.rates.append((made.events / spent, made.events / made.wall))


def added(proxy: Proxy, streams: int, base: list[float]) -> tuple[float, float, float]:
    """Median, its added part, and p99 beyond the direct median, in milliseconds."""
    firsts = [first for made in proxy.bursts[streams] for first in made.firsts]
    middle = quantile(base, 0.5)
    median = quantile(firsts, 0.5)
    return median, median - middle, quantile(firsts, 0.99) - middle


def report(arguments: argparse.Namespace, direct: dict[int, list[Burst]], proxies: list[Proxy]) -> None:
    latency = Table(
        "Front door: time to the first token",
        ("through", "streams", "direct ms", "median ms", "added ms", "added p99 ms", "LiteLLM / this, added"),
    )
    for streams, bursts in direct.items():
        base = [first for made in bursts for first in made.firsts]
        rival = [added(p, streams, base)[1] for p in proxies if p.target.name == "LiteLLM"]
        for proxy in proxies:
            median, more, late = added(proxy, streams, base)
            ratio = f"{rival[0] / more:.1f}" if rival and proxy.target.name != "LiteLLM" else "-"
            direct_text = f"{quantile(base, 0.5):.2f} (p99 {quantile(base, 0.99):.2f})"
            latency.add(
                proxy.target.name, streams, direct_text, f"{median:.2f}", f"{more:.2f}", f"{late:.2f}", ratio
            )
    latency.notes.append(
        f"{arguments.tokens} tokens, one every {arguments.interval_ms:g} ms; {arguments.repeats} rounds of "
        f"{arguments.requests} requests per stream, started at random moments; added p99 is against the "
        "direct median"
    )
    latency.notes.append(versions())
    latency.publish("front_door", keep=arguments.keep)
    rates = Table(
        "Front door: streamed events per CPU second",
        ("through", "unthrottled", "min", "max", "events / s", "/ LiteLLM", "token by token", "/ LiteLLM "),
    )
    rivals = [proxy for proxy in proxies if proxy.target.name == "LiteLLM"]
    for proxy in proxies:
        per_cpu = [rate for rate, _ in proxy.rates]
        middle, paced = quantile(per_cpu, 0.5), quantile(proxy.paced, 0.5)
        times = ["-", "-"]
        if rivals and proxy not in rivals:
            times = [
                f"{middle / quantile([rate for rate, _ in rivals[0].rates], 0.5):.1f}",
                f"{paced / quantile(rivals[0].paced, 0.5):.1f}",
            ]
        rates.add(
            proxy.target.name,
            *(f"{middle:,.0f}", f"{min(per_cpu):,.0f}", f"{max(per_cpu):,.0f}"),
            f"{quantile([rate for _, rate in proxy.rates], 0.5):,.0f}",
            times[0],
            f"{paced:,.0f}",
            times[1],
        )
    rates.notes.append(
        f"{FAST_STREAMS} streams of {arguments.fast_tokens} tokens, {arguments.repeats} rounds"
    )
    rates.publish("front_door_rate", keep=arguments.keep)


def versions() -> str:
    names = ("uvicorn", "httptools", "aiohttp", "uvloop", "msgspec")
    return f"{platform.system()}, " + ", ".join(f"{name} {version(name)}" for name in names)


async def run(arguments: argparse.Namespace, base: Target, proxies: list[Proxy]) -> dict[int, list[Burst]]:
    direct: dict[int, list[Burst]] = {}
    for proxy in proxies:
        for model in ("fake", "fake-fast"):
            warm = Target(proxy.target.name, proxy.target.base_url, proxy.target.key, model)
            (await burst(warm, 4, 2, 5, 0.0)).check(warm.name)
    for streams in arguments.streams:
        await measure(arguments, direct.setdefault(streams, []), proxies, base, streams)
    await flood(arguments, proxies)
    return direct


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[16, 50, 64]
    )
    options.add_argument("--requests", type=int, default=3, help="requests per stream and round")
    options.add_argument("--tokens", type=int, default=100, help="tokens of an answer")
    options.add_argument("--interval-ms", type=float, default=20.0, help="between two tokens")
    options.add_argument("--fast-tokens", type=int, default=20_000, help="tokens of an unthrottled answer")
    options.add_argument(
        "--litellm", default=os.environ.get("MESHNET_BENCH_LITELLM", ""), help="path of its executable"
    )
    options.set_defaults(repeats=3)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        trackers = []
        for label in ("tracker, free calls", "tracker, priced calls"):
            data = folder / label.split()[-2]
            log = data.with_suffix(".log")
            command = [
                sys.executable,
                "-m",
                "meshnet",
                "tracker",
                "--json",
                "--port",
                "0",
                "--grpc-port",
                "0",
            ]
            started = stack.enter_context(process([*command, "--data", str(data)], log))
            info = first_line(started, log)
            node_log = data.with_suffix(".node.log")
            node = stack.enter_context(
                process(
                    [
                        *(sys.executable, "benchmarks/fake_node.py", "--tracker", info["grpc_address"]),
                        *("--token", info["join_token"], "--interval-ms", str(arguments.interval_ms)),
                    ],
                    node_log,
                )
            )
            upstream = first_line(node, node_log)["base_url"]
            root = info["base_url"].removesuffix("/v1")
            wait_ready(f"{root}/readyz", 30)
            if "priced" in label:
                for model in ("fake", "fake-fast"):
                    price = {"model": model, "input": 1_000_000, "output": 2_000_000}
                    ask(f"{root}/api/prices", info["admin_key"], price)
            trackers.append(Proxy(Target(label, info["base_url"], info["api_key"]), started.pid))
        rival = stack.enter_context(litellm(arguments.litellm, upstream, folder))
        proxies = [*trackers, *([rival] if rival else [])]
        direct = uvloop.run(run(arguments, Target("direct", upstream), proxies))
    report(arguments, direct, proxies)


if __name__ == "__main__":
    main()
