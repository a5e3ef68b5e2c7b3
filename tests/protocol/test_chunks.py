"""Chunks and answers from events, in OpenAI's shapes, read back by OpenAI's own types."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshnet.protocol.calls import (
    AnyEvent,
    CallError,
    ChoiceEnd,
    Done,
    LostNode,
    Opened,
    Prefill,
    Rerouted,
    TokenEvent,
)
from meshnet.protocol.chunks import AnswerAssembler, ChunkRenderer, Envelope, error_event, keep_alive
from meshnet.protocol.openai import ApiError, ChatRequest, CompletionRequest, parse_chat, parse_completion
from meshnet.protocol.tools import HERMES

ENVELOPE = Envelope("call-7", 1_700_000_000, "m", "fp_1")
Request = ChatRequest | CompletionRequest


def chat(**more: Any) -> ChatRequest:
    return parse_chat(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **more}).encode()
    )


def completion(**more: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **more}).encode())


def tokens(
    *texts: str, choice: int = 0, reason: str = "stop", by: str = "eos", rest: str = ""
) -> list[AnyEvent]:
    events: list[AnyEvent] = [TokenEvent(choice, (1,), text) for text in texts]
    return [*events, ChoiceEnd(choice, reason, by, rest)]


def stream(request: Request, events: Iterable[AnyEvent]) -> bytes:
    renderer = ChunkRenderer(request, ENVELOPE, HERMES)
    return b"".join(renderer.feed(event) for event in events)


def data(stream: bytes) -> list[Any]:
    """The events of a stream; `[DONE]` must be last and every event must have its blank line."""
    assert stream.endswith(b"data: [DONE]\n\n")
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event[6:]) for event in events]


def answer(request: Request, events: Iterable[AnyEvent]) -> Any:
    assembler = AnswerAssembler(request, ENVELOPE, HERMES)
    for event in events:
        assembler.feed(event)
    assert assembler.done
    return json.loads(assembler.body())


def test_a_chat_stream() -> None:
    events = [Opened(5, 3), Prefill(5, 5), *tokens("Hé", "", "llo", rest=" you"), Done(5, 3, 3)]
    chunks = data(stream(chat(stream=True, stream_options={"include_usage": True}), events))
    shared = {
        "id": "chatcmpl-7",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_1",
    }
    assert all(chunk.items() >= shared.items() for chunk in chunks)
    deltas = [{"role": "assistant", "content": "", "refusal": None}]
    deltas += [{"content": text} for text in ("Hé", "llo", " you")]
    for chunk, delta in zip(chunks, deltas, strict=False):
        assert chunk["choices"] == [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        assert chunk["usage"] is None
    assert chunks[4]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert chunks[5]["choices"] == []
    assert chunks[5]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert len(chunks) == 6
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_usage_is_shown_only_when_asked() -> None:
    renderer = ChunkRenderer(chat(stream=True), ENVELOPE)
    chunks = data(b"".join(map(renderer.feed, [Opened(5), *tokens("a", "b"), Done(5, 2)])))
    assert all("usage" not in chunk for chunk in chunks)
    assert (renderer.usage.prompt_tokens, renderer.usage.completion_tokens) == (5, 2)


def test_a_completion_stream() -> None:
    chunks = data(
        stream(
            completion(stream=True), [Opened(2), *tokens("a", "b", reason="length", by="limit"), Done(2, 2)]
        )
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {("cmpl-7", "text_completion")}
    for chunk in chunks[2:]:
        Completion.model_validate(chunk)


def test_whole_answers() -> None:
    events = [Opened(5), *tokens("Hel", "lo"), Done(5, 2)]
    whole = answer(chat(), events)
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert whole["usage"]["total_tokens"] == 7
    assert (whole["object"], whole["id"]) == ("chat.completion", "chatcmpl-7")
    ChatCompletion.model_validate(whole)
    text = answer(completion(), events)
    assert text["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    Completion.model_validate(text)


def test_an_empty_answer_still_has_its_role() -> None:
    chunks = data(stream(chat(stream=True), [Opened(1), *tokens(), Done(1, 0)]))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert answer(chat(), [Opened(1), *tokens(), Done(1, 0)])["choices"][0]["message"]["content"] == ""


def test_several_choices_mixed() -> None:
    events: list[AnyEvent] = [
        Opened(4),
        TokenEvent(1, (1,), "b1"),
        TokenEvent(0, (1,), "a1"),
        ChoiceEnd(1, "length", "limit"),
        TokenEvent(0, (2, 3), "a2"),
        ChoiceEnd(0, "stop", "eos", "!"),
        Done(4, 4),
    ]
    texts = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    roles = []
    for chunk in data(stream(chat(stream=True, n=2), events)):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "a1a2!", 1: "b1"}
    assert reasons == {0: "stop", 1: "length"}
    assert roles == [1, 0]
    whole = answer(chat(n=2), events)
    assert [c["message"]["content"] for c in whole["choices"]] == ["a1a2!", "b1"]
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["usage"]["prompt_tokens"] == 4


def test_a_failover_leaves_no_trace() -> None:
    calm: list[AnyEvent] = [Opened(4), *tokens("a", "b"), Done(4, 2)]
    moved: list[AnyEvent] = [
        Opened(4),
        TokenEvent(0, (1,), "a"),
        LostNode("n2", "unreachable", "gone"),
        Rerouted(1, 5, 3.0),
        Opened(4, 2),
        TokenEvent(0, (1,), "b"),
        ChoiceEnd(0, "stop", "eos"),
        Done(4, 2),
    ]
    assert stream(chat(stream=True), moved) == stream(chat(stream=True), calm)


def test_the_fallback_model_is_named_from_there_on() -> None:
    renderer = ChunkRenderer(chat(stream=True), ENVELOPE)
    first = renderer.feed(TokenEvent(0, (1,), "a"))
    renderer.use_model("small")
    rest = b"".join(map(renderer.feed, [*tokens("b"), Done(1, 2)]))
    assert b'"model":"m"' in first
    assert {chunk["model"] for chunk in data(rest)} == {"small"}
    assert {chunk["id"] for chunk in data(rest)} == {"chatcmpl-7"}


def test_errors_after_the_first_byte() -> None:
    renderer = ChunkRenderer(chat(stream=True), ENVELOPE)
    assert not renderer.started
    renderer.feed(TokenEvent(0, (1,), "a"))
    assert renderer.started
    events = data(renderer.feed(CallError(503, "no_route", "all nodes are gone")))
    assert events == [
        {
            "error": {
                "message": "all nodes are gone",
                "type": "server_error",
                "code": "no_route",
                "param": None,
            }
        }
    ]
    assert renderer.feed(TokenEvent(0, (1,), "late")) == b""
    assert renderer.fail(ApiError(500, "again")) == b""
    refused = data(error_event(ApiError(400, "bad", code="x", param="p")))
    assert refused[0]["error"]["param"] == "p"


def test_an_answer_without_its_end_is_no_answer() -> None:
    assembler = AnswerAssembler(chat(n=2), ENVELOPE)
    for event in (Opened(1), *tokens("a"), CallError(500, "engine", "broken")):
        assembler.feed(event)
    assert assembler.error is not None
    assert assembler.error.code == "engine"
    assert assembler.ended_choices == (0,)
    with pytest.raises(ValueError, match="not complete"):
        assembler.body()


LP = ("é", -0.5, (195, 169), (("é", -0.5, (195, 169)), ("e", float("-inf"), (101,))))


def test_logprobs() -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    event = TokenEvent(0, (1,), "é", (LP,))
    entry = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "e", "logprob": -9999.0, "bytes": [101]},
        ],
    }
    events: list[AnyEvent] = [Opened(1), event, ChoiceEnd(0, "stop", "eos"), Done(1, 1)]
    chunks = data(stream(chat(stream=True, **asked), events))
    assert chunks[1]["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    assert chunks[0]["choices"][0]["logprobs"] is None
    whole = answer(chat(**asked), events)
    assert whole["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    ChatCompletion.model_validate(whole)
    text = answer(completion(logprobs=2), [Opened(1), event, event, ChoiceEnd(0, "stop", "eos"), Done(1, 1)])
    assert text["choices"][0]["logprobs"] == {
        "tokens": ["é", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"é": -0.5, "e": -9999.0}] * 2,
        "text_offset": [0, 1],
    }
    Completion.model_validate(text)


def lp(piece: str) -> tuple[str, float, tuple[int, ...], tuple[()]]:
    return (piece, -1.0, tuple(piece.encode()), ())


def shown_tokens(events: list[AnyEvent]) -> list[str]:
    whole = answer(chat(logprobs=True), [Opened(1), *events, Done(1, 1)])
    streamed = data(stream(chat(stream=True, logprobs=True), [Opened(1), *events, Done(1, 1)]))
    found = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [entry["token"] for some in logprobs if some for entry in some["content"]] == found
    return found


def test_logprobs_wait_for_their_text_and_leave_out_the_stop_string() -> None:
    held = [TokenEvent(0, (1,), "", (lp("a S"),)), TokenEvent(0, (2,), "", (lp("T"),))]
    assert shown_tokens([*held, ChoiceEnd(0, "stop", "stop_string", "a ")]) == ["a S"]
    assert shown_tokens([*held, ChoiceEnd(0, "stop", "eos", "a ST")]) == ["a S", "T"]
    assert shown_tokens([*held, ChoiceEnd(0, "stop", "stop_string")]) == []


CALL_TEXT = 'Look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_tool_calls() -> None:
    events = [Opened(1), *tokens(*CALL_TEXT), Done(1, len(CALL_TEXT))]
    whole = answer(chat(tools=TOOLS), events)
    message, reason = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
    assert (message["content"], reason) == ("Look.", "tool_calls")
    assert message["tool_calls"] == [
        {
            "id": message["tool_calls"][0]["id"],
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        }
    ]
    ChatCompletion.model_validate(whole)
    chunks = data(stream(chat(tools=TOOLS, stream=True), events))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Look."
    called = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert called[0] == {
        "index": 0,
        "id": message["tool_calls"][0]["id"],
        "type": "function",
        "function": {"name": "add", "arguments": ""},
    }
    assert "".join(part["function"]["arguments"] for part in called) == '{"a": 1}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_a_call_alone_has_null_content_and_a_cut_one_keeps_its_reason() -> None:
    text = CALL_TEXT[6:]
    events = [Opened(1), *tokens(text), Done(1, 1)]
    assert answer(chat(tools=TOOLS), events)["choices"][0]["message"]["content"] is None
    first = data(stream(chat(tools=TOOLS, stream=True), events))[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": None, "refusal": None}
    cut = answer(chat(tools=TOOLS), [Opened(1), *tokens(text[:-20], reason="length", by="limit"), Done(1, 1)])
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_without_tools_the_text_is_left_alone() -> None:
    events = [Opened(1), *tokens(CALL_TEXT), Done(1, 1)]
    for request in (chat(), chat(tools=TOOLS, tool_choice="none")):
        whole = answer(request, events)
        assert whole["choices"][0]["message"]["content"] == CALL_TEXT
        assert whole["choices"][0]["finish_reason"] == "stop"


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=8)), max_size=20))
def test_streams_and_answers_say_the_same(parts: list[tuple[int, str]]) -> None:
    events: list[AnyEvent] = [Opened(3), *(TokenEvent(c, (1,), text) for c, text in parts)]
    events += [*(ChoiceEnd(c, "stop", "eos") for c in range(3)), Done(3, len(parts))]
    said = ["", "", ""]
    for chunk in data(stream(chat(stream=True, n=3), events)):
        choice = chunk["choices"][0]
        said[choice["index"]] += choice["delta"].get("content", "")
    assert said == [c["message"]["content"] for c in answer(chat(n=3), events)["choices"]]
    assert said == ["".join(text for c, text in parts if c == index) for index in range(3)]


def test_keep_alive_comments_are_one_line() -> None:
    assert keep_alive("prefill", "256/1024") == b": prefill 256/1024\n\n"
    assert keep_alive("queued") == b": queued\n\n"
    assert keep_alive("a\nb", "c\rd").count(b"\n") == 2


def test_a_delta_costs_little() -> None:
    """5 microseconds are the budget; a machine under load gets three times as much."""
    renderer = ChunkRenderer(chat(stream=True), ENVELOPE)
    event = TokenEvent(0, (1,), " word")
    renderer.feed(event)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(20):
            renderer.feed(event)
        times.append((time.perf_counter() - begin) / 20)
    assert sorted(times)[100] < 15e-6
