"""Real clients: the OpenAI SDKs for Python and JavaScript, and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tracker.conftest import Running, Start

TEXT = "".join(f" t{k}" for k in range(8))
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
JAVASCRIPT = Path(__file__).parent / "javascript"


def client(tracker: Running, max_retries: int = 2) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tracker.base}/v1", api_key=tracker.use_key, max_retries=max_retries)


async def test_the_python_sdk_reads_answers_streams_and_models(tracker: Running) -> None:
    await tracker.node()
    async with client(tracker) as api:
        assert [model.id async for model in api.models.list()] == ["toy"]
        answer = await api.chat.completions.create(model="toy", messages=MESSAGES)
        assert answer.choices[0].message.content == TEXT
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        stream = await api.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", 0
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            if chunk.usage is not None:
                usage = chunk.usage.completion_tokens
        assert (text, usage) == (TEXT, 8)
        completion = await api.completions.create(model="toy", prompt="Once")
        assert completion.choices[0].text == TEXT


async def test_the_synchronous_python_sdk(tracker: Running) -> None:
    await tracker.node()

    def ask() -> str:
        with openai.OpenAI(base_url=f"{tracker.base}/v1", api_key=tracker.use_key) as api:
            stream = api.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == TEXT


async def test_the_python_sdk_aborts_and_the_node_stops(tracker: Running) -> None:
    node = await tracker.node()
    node.script.tokens, node.script.interval_s = 100_000, 0.01
    async with client(tracker) as api:
        stream = await api.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await asyncio.wait_for(node.seen[0].closed.wait(), 3)


async def test_the_python_sdk_tries_again_after_a_full_queue(start: Start) -> None:
    tracker = await start(queue_length=1)
    node = await tracker.node(slots=1)
    node.script.first_s = 1.0
    busy = [asyncio.create_task(tracker.chat())]
    await tracker.until(lambda: len(node.open_calls) == 1)
    busy.append(asyncio.create_task(tracker.chat()))
    await asyncio.sleep(0.1)
    async with client(tracker, max_retries=5) as api:
        answer = await api.chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    for answered in await asyncio.gather(*busy):
        assert answered.status == 200


async def test_the_python_sdk_sees_errors_as_its_own_kinds(tracker: Running) -> None:
    await tracker.node()
    async with client(tracker, max_retries=0) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="nothing", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="toy", messages=[])
        assert bad.value.param == "messages"
    async with openai.AsyncOpenAI(base_url=f"{tracker.base}/v1", api_key="wrong", max_retries=0) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.models.retrieve("toy")


async def test_curl_streams(tracker: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    await tracker.node()
    body = json.dumps({"model": "toy", "messages": MESSAGES, "stream": True})
    process = await asyncio.create_subprocess_exec(
        curl,
        "-sNi",
        f"{tracker.base}/v1/chat/completions",
        "-H",
        f"Authorization: Bearer {tracker.use_key}",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    head, _, rest = output.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "text/event-stream" in head
    assert rest.endswith("data: [DONE]\n\n")


async def test_the_javascript_sdk(tracker: Running) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js and npm are not installed")
    if not (JAVASCRIPT / "node_modules" / "openai").is_dir():
        installing = await asyncio.create_subprocess_exec(
            npm, "ci", "--no-audit", "--no-fund", cwd=JAVASCRIPT, stdout=asyncio.subprocess.PIPE
        )
        await installing.communicate()
        if installing.returncode != 0:
            pytest.skip("the SDK could not be installed from npm")
    await tracker.node()
    endless = await tracker.node(model="endless")
    endless.script.tokens, endless.script.interval_s = 100_000, 0.01
    process = await asyncio.create_subprocess_exec(
        node,
        "client.mjs",
        f"{tracker.base}/v1",
        tracker.use_key,
        cwd=JAVASCRIPT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    assert json.loads(output) == {
        "models": ["endless", "toy"],
        "answer": TEXT,
        "usage": 8,
        "streamUsage": 8,
        "stream": TEXT,
        "aborted": 3,
        "error": [404, "model_not_found"],
    }
    await asyncio.wait_for(endless.seen[0].closed.wait(), 3)
