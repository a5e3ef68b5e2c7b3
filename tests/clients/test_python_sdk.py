"""OpenAI's Python SDK against the real demo: sync, async, streams, aborts, retries, errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from clients.kit import STORY, check_stopped, computed_tokens, newest_call
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field
from support.mesh import Demo, Mesh

MODEL = "smollm2"
CAPITAL: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
TELL: list[ChatCompletionMessageParam] = [{"role": "user", "content": STORY}]


@pytest.fixture
def client(demo: Demo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.base_url, api_key=demo.api_key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(demo: Demo) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=demo.base_url, api_key=demo.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


# ---------------------------------------------------------------- answers


def test_models(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.object for model in listed] == ["model"]
    assert client.models.retrieve(listed[0].id) == listed[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint


def test_a_stream_says_what_the_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 3


def test_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}
    whole = client.completions.create(**options, max_tokens=8, logprobs=2)
    assert whole.object == "text_completion"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text
    stream = client.completions.create(**options, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_choices_differ_and_seeds_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=TELL, n=3, seed=11, temperature=1.0, max_tokens=16
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert "".join(entry.token for entry in shown.content) == answer.choices[0].message.content
    for entry in shown.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes or ()).decode("utf-8", "replace") == entry.token


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_shown(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    full = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = full[6:13]  # spans tokens
    if stream:
        chunks = list(client.chat.completions.create(**options, stop=[stop], stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**options, stop=stop).choices[0]
        said, reason = choice.message.content or "", choice.finish_reason
    assert said == full[: full.index(stop)]
    assert reason == "stop"


def test_unicode_is_never_cut(client: openai.OpenAI) -> None:
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Repeat: 水火風 😀 Zürich"}]
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, temperature=1.5, seed=3, max_tokens=48, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text
    text.encode("utf-8")


class Verdict(BaseModel):
    """Small, so that any model ends it within a few tokens."""

    answer: Literal["yes", "no"]
    score: int = Field(ge=0, le=100)


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet? Answer as JSON."}],
        response_format=Verdict,
        temperature=0,
        max_tokens=64,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_the_stream_helper_puts_the_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Is fire cold? Answer as JSON."}],
        response_format=Verdict,
        temperature=0,
        max_tokens=64,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Verdict)


def test_json_object(client: openai.OpenAI) -> None:
    for seed in range(3):
        choice = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": 'Answer with {"colour": "..."} for the sky.'}],
            response_format={"type": "json_object"},
            seed=seed,
            max_tokens=48,
        ).choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
        else:
            assert choice.finish_reason == "length"


# ---------------------------------------------------------------- async


async def test_async_streams_side_by_side(async_client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=TELL, seed=seed, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    first = await asyncio.gather(*(ask(seed) for seed in range(4)))
    assert len(set(first)) == 4
    assert await asyncio.gather(*(ask(seed) for seed in range(4))) == first


async def test_async_answers(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content


async def test_a_cancelled_task_stops_the_nodes(demo: Demo, async_client: openai.AsyncOpenAI) -> None:
    started = asyncio.Event()

    async def ask() -> None:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=TELL, temperature=0, max_tokens=1000, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                started.set()

    task = asyncio.create_task(ask())
    async with asyncio.timeout(60):
        await started.wait()
    call = await asyncio.to_thread(newest_call, demo)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(check_stopped, demo, call["id"])


# ---------------------------------------------------------------- aborts


def test_closing_a_stream_stops_the_nodes(demo: Demo, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=TELL, temperature=0, max_tokens=1000, stream=True
    )
    seen = 0
    for chunk in stream:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 4:
            break
    call = newest_call(demo)
    assert call["phase"] == "generating"
    stream.close()
    check_stopped(demo, call["id"])
    assert demo.get(f"/api/calls/{call['id']}")["output_tokens"] < 1000


def test_a_client_that_gives_up_waiting_stops_the_nodes(demo: Demo, client: openai.OpenAI) -> None:
    before = computed_tokens(demo)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.5).chat.completions.create(
            model=MODEL, messages=TELL, temperature=0, max_tokens=1000
        )
    call = newest_call(demo)
    assert not call["stream"]
    check_stopped(demo, call["id"])
    assert computed_tokens(demo) > before


def test_delete_ends_a_stream_with_an_error_event(demo: Demo, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=TELL, temperature=0, max_tokens=1000, stream=True
    )
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    call = newest_call(demo)
    with demo.client(admin=True) as admin:
        admin.delete(f"/api/calls/{call['id']}").raise_for_status()
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "cancelled"
    check_stopped(demo, call["id"])


# ---------------------------------------------------------------- errors and retries


def test_errors_have_their_classes(demo: Demo, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, extra_body={"foo": 1})
    assert unknown.value.param == "foo"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL,
            messages=CAPITAL,
            tools=[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
        )
    assert tools.value.param == "tools"
    assert "chat template" in tools.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=CAPITAL)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="mn-wrong").models.list()
    assert demo.get("/healthz")


def test_a_rate_limited_key_is_told_when_to_come_back(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 with Retry-After, which the SDK obeys: it sleeps as long as it was told, then asks again."""
    with demo.client(admin=True) as admin:
        made = admin.post("/api/keys", json={"account": "home", "name": "slow", "requests_per_minute": 1})
        made.raise_for_status()
        key = made.json()["secret"]
    slept: list[float] = []
    with openai.OpenAI(base_url=demo.base_url, api_key=key, max_retries=0, timeout=60) as client:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=2)
        told = float(caught.value.response.headers["retry-after"])
        assert 0 < told <= 60
        monkeypatch.setattr(time, "sleep", slept.append)
        with pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=2).chat.completions.create(
                model=MODEL, messages=CAPITAL, max_tokens=2
            )
    assert len(slept) == 2
    assert all(told - 5 <= seconds <= told + 1 for seconds in slept)


def test_retries_carry_a_client_over_a_gap(mesh: Mesh) -> None:
    """Half the layers are missing: 503 with Retry-After. The SDK tries again, and finds them."""
    mesh.start_tracker()
    mesh.start_node("front", "0-14")
    mesh.wait_ready("front")
    base, key = f"{mesh.root}/v1", mesh.info["api_key"]
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=60) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=4)
        assert caught.value.status_code == 503
        assert caught.value.code == "no_route"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        mesh.start_node("back", "15-29")
        answer = client.with_options(max_retries=20).chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, max_tokens=12
        )
    assert answer.choices[0].message.content
