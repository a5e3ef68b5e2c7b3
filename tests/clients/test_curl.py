"""curl against the real demo: the bytes on the wire, headers, kept-alive connections, an interrupt."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clients.kit import STORY, check_stopped, newest_call
from support.mesh import Demo

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def command(demo: Demo, *more: str, path: str = "/chat/completions", **body: Any) -> list[str]:
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}], **body}
    return [
        *("curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60"),
        *("--header", f"authorization: Bearer {demo.api_key}"),
        *("--header", "content-type: application/json"),
        *more,
        *("--data", json.dumps(asked), f"{demo.base_url}{path}"),
    ]


def run(arguments: list[str]) -> str:
    return subprocess.run(arguments, capture_output=True, check=True, timeout=90).stdout.decode()


def test_a_stream_on_the_wire(demo: Demo) -> None:
    out = run(command(demo, "--include", stream=True, max_tokens=8, stream_options={"include_usage": True}))
    head, _, body = out.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert status == "HTTP/1.1 200 OK"
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]
    assert headers["x-meshnet-call"].startswith("call-")
    assert "content-encoding" not in headers
    assert headers.get("connection", "keep-alive") == "keep-alive"
    assert body.endswith("data: [DONE]\n\n")
    events = [event for event in body.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 8


def test_compression_is_not_taken_up(demo: Demo) -> None:
    out = run(command(demo, "--include", "--header", "accept-encoding: gzip, br", stream=True, max_tokens=2))
    assert "content-encoding" not in out.lower()
    assert out.endswith("data: [DONE]\n\n")


def test_a_request_id_comes_back(demo: Demo) -> None:
    out = run(command(demo, "--include", "--header", "x-request-id: my-id-7", max_tokens=2))
    assert "x-request-id: my-id-7" in out.lower()


def test_one_connection_carries_many_calls(demo: Demo) -> None:
    one = command(demo, "--verbose", stream=True, max_tokens=2)
    two = command(demo, max_tokens=2)[1:]
    arguments = [*one]
    for more in (two, one[1:], two):
        arguments += ["--next", *(part for part in more if part != "--verbose"), "--verbose"]
    done = subprocess.run(arguments, capture_output=True, check=True, timeout=120)
    said = done.stderr.decode()
    assert said.count("Connected to") == 1
    assert said.count("Re-using existing connection") == 3


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias.99999999"),  # only a head knows the vocabulary
    ],
)
def test_an_error_is_a_status_and_a_shape(demo: Demo, asked: dict[str, Any], param: str) -> None:
    out = run(command(demo, "--write-out", "\n%{http_code}", **asked))
    body, _, status = out.rpartition("\n")
    assert status == "400"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["param"] == param


@contextmanager
def streaming(demo: Demo, into: Path) -> Iterator[subprocess.Popen[bytes]]:
    asked = [{"role": "user", "content": STORY}]
    with into.open("wb") as out:
        started = subprocess.Popen(
            command(demo, stream=True, max_tokens=1000, temperature=0, messages=asked), stdout=out
        )
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()
            started.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_curl_stops_the_nodes(demo: Demo, tmp_path: Path, number: signal.Signals) -> None:
    into = tmp_path / "out"
    with streaming(demo, into) as started:
        deadline = time.monotonic() + 60
        while into.read_bytes().count(b'"content":"') < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        call = newest_call(demo)
        started.send_signal(number)
        started.wait(10)
    check_stopped(demo, call["id"])
