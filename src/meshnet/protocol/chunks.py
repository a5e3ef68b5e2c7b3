"""From a head's events to OpenAI's answers: the chunks of a stream, or one whole answer.

`ChunkRenderer` and `AnswerAssembler` are pure: events in, bytes out. Identity (`Envelope`) is fixed at
acceptance, so id, created and system_fingerprint stay what they were when a call moves to other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from meshnet.protocol.calls import AnyEvent, CallError, ChoiceEnd, Done, Opened, TokenEvent
from meshnet.protocol.errors import ApiError, error_body
from meshnet.protocol.openai import ChatRequest, CompletionRequest
from meshnet.protocol.toolparser import CallDelta, Delta, TextDelta, ToolParser
from meshnet.protocol.tools import ToolFormat

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value."""

_encode = msgspec.json.Encoder().encode
_Logprob = tuple[str, float, tuple[int, ...], tuple[tuple[str, float, tuple[int, ...]], ...]]


@dataclass(frozen=True)
class Envelope:
    """What every chunk of a call repeats. `created` in unix seconds."""

    call_id: str
    created: int
    model: str
    fingerprint: str

    def answer_id(self, chat: bool) -> str:
        return ("chatcmpl-" if chat else "cmpl-") + self.call_id.removeprefix("call-")


@dataclass
class Usage:
    """Tokens of a call so far; the prompt counts once however many choices share it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def note(self, event: AnyEvent) -> None:
        """Counts what the event says. Replayed tokens are in no event, so none counts twice."""
        if isinstance(event, TokenEvent):
            self.completion_tokens += len(event.ids)
        elif isinstance(event, Opened) and not self.prompt_tokens:
            # What a rebuilt session reuses after a failover was computed for this same call.
            self.prompt_tokens = event.prompt_tokens
            self.cached_tokens = event.reused_tokens

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def keep_alive(phase: str, detail: str = "") -> bytes:
    """An SSE comment; clients skip it. `detail` such as `256/1024` or `position 3`."""
    text = f"{phase} {detail}".strip().replace("\r", " ").replace("\n", " ")
    return f": {text}\n\n".encode()


def error_event(error: ApiError | CallError) -> bytes:
    """An error after the first byte of a stream, and the stream's end."""
    return b"data: " + error_body(error.message, error.type, error.code, error.param) + b"\n\n" + DONE


class ChunkRenderer:
    """One streamed call. Feed every event in order; what comes back is ready for the socket.

    `tool_format`: the model's, from its chat template; it is used only where the request has tools.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        envelope: Envelope,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.usage = Usage()
        self.started = False
        """Whether `feed` has returned anything yet."""
        self._chat = isinstance(request, ChatRequest)
        self._include_usage = request.include_usage
        self._envelope = envelope
        self._ended = 0
        self._closed = False
        self._choices = [_Choice(index, request, envelope, tool_format) for index in range(request.n)]
        # A choice whose deltas are its text and nothing else takes the short way.
        self._plain = request.logprobs < 0 and self._choices[0].parser is None
        self._frame()

    @property
    def ended_choices(self) -> tuple[int, ...]:
        return tuple(choice.index for choice in self._choices if choice.reason is not None)

    def use_model(self, model: str) -> None:
        """From here on the answer comes from this model (the fallback)."""
        self._envelope = replace(self._envelope, model=model)
        self._frame()

    def feed(self, event: AnyEvent) -> bytes:
        """The SSE bytes that this event makes; empty where it makes none."""
        if self._closed:
            return b""
        if type(event) is TokenEvent:
            choice = self._choices[event.c]
            self.usage.completion_tokens += len(event.ids)
            if self._plain and choice.started and choice.reason is None:
                if not event.text:
                    return b""
                prefix, suffix = self._content[event.c]
                return prefix + _encode(event.text) + suffix
            out = self._render(choice, *choice.take(event.text, event.lp))
        else:
            out = self._other(event)
        if out:
            self.started = True
        return out

    def fail(self, error: ApiError | CallError) -> bytes:
        """The error event and `[DONE]`; nothing after the stream has ended."""
        if self._closed:
            return b""
        self._closed = True
        self.started = True
        return error_event(error)

    def _other(self, event: AnyEvent) -> bytes:
        if isinstance(event, ChoiceEnd):
            choice = self._choices[event.c]
            if choice.reason is not None:
                return b""
            deltas, logprobs = choice.end(event)
            out = self._render(choice, deltas, logprobs)
            return out + self._opening(choice, None) + self._chunk(choice, b"{}", None, choice.reason)
        if isinstance(event, Done):
            self._closed = True
            return (self._usage_chunk() if self._include_usage else b"") + DONE
        if isinstance(event, CallError):
            return self.fail(event)
        self.usage.note(event)
        return b""

    def _render(self, choice: _Choice, deltas: list[Delta], logprobs: list[_Logprob]) -> bytes:
        out = []
        if logprobs and not deltas:
            deltas = [TextDelta("")]
        for delta in deltas:
            out.append(self._opening(choice, delta))
            shown = choice.logprobs(logprobs) if logprobs else None
            logprobs = []
            if self._chat:
                body = _encode(_chat_delta(delta))
            else:
                body = _encode(delta.text if isinstance(delta, TextDelta) else "")
            out.append(self._chunk(choice, body, shown, None))
        return b"".join(out)

    def _opening(self, choice: _Choice, first: Delta | None) -> bytes:
        """The chunk with the role, once per choice; content is null where a tool call comes first."""
        if choice.started:
            return b""
        choice.started = True
        if not self._chat:
            return b""
        content = "" if first is None or isinstance(first, TextDelta) else None
        role = {"role": "assistant", "content": content, "refusal": None}
        return self._chunk(choice, _encode(role), None, None)

    def _chunk(self, choice: _Choice, body: bytes, logprobs: Any, reason: str | None) -> bytes:
        if not self._chat and reason is not None:
            body = b'""'
        return b"".join(
            (
                self._head,
                b'"choices":[{"index":%d,' % choice.index,
                b'"delta":' if self._chat else b'"text":',
                body,
                b',"logprobs":',
                b"null" if logprobs is None else _encode(logprobs),
                b',"finish_reason":',
                _encode(reason),
                self._tail,
            )
        )

    def _usage_chunk(self) -> bytes:
        return self._head + b'"choices":[],"usage":' + _encode(self.usage.plain()) + b"}\n\n"

    def _frame(self) -> None:
        head = {
            "id": self._envelope.answer_id(self._chat),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._envelope.created,
            "model": self._envelope.model,
            "system_fingerprint": self._envelope.fingerprint,
        }
        self._head = b"data: " + _encode(head)[:-1] + b","
        self._tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        opening = b'"delta":{"content":' if self._chat else b'"text":'
        closing = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null' + self._tail
        self._content = [
            (self._head + b'"choices":[{"index":%d,' % choice.index + opening, closing)
            for choice in self._choices
        ]


class AnswerAssembler:
    """One call without a stream: feed every event, then take `body()`."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        envelope: Envelope,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.usage = Usage()
        self.error: CallError | None = None
        self.done = False
        self._chat = isinstance(request, ChatRequest)
        self._envelope = envelope
        self._choices = [_Choice(index, request, envelope, tool_format) for index in range(request.n)]
        self._deltas: list[list[Delta]] = [[] for _ in self._choices]
        self._logprobs: list[list[_Logprob]] = [[] for _ in self._choices]

    @property
    def ended_choices(self) -> tuple[int, ...]:
        return tuple(choice.index for choice in self._choices if choice.reason is not None)

    def use_model(self, model: str) -> None:
        """The answer comes from this model (the fallback)."""
        self._envelope = replace(self._envelope, model=model)

    def feed(self, event: AnyEvent) -> None:
        self.usage.note(event)
        if isinstance(event, TokenEvent):
            self._add(event.c, *self._choices[event.c].take(event.text, event.lp))
        elif isinstance(event, ChoiceEnd):
            choice = self._choices[event.c]
            if choice.reason is None:
                self._add(event.c, *choice.end(event))
        elif isinstance(event, Done):
            self.done = True
        elif isinstance(event, CallError):
            self.error = event

    def body(self) -> bytes:
        """The answer as JSON. Raises ValueError before every choice has ended."""
        if len(self.ended_choices) != len(self._choices):
            raise ValueError("the answer is not complete")
        render = self._chat_choice if self._chat else self._text_choice
        return _encode(
            {
                "id": self._envelope.answer_id(self._chat),
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._envelope.created,
                "model": self._envelope.model,
                "choices": [render(choice) for choice in self._choices],
                "usage": self.usage.plain(),
                "system_fingerprint": self._envelope.fingerprint,
            }
        )

    def _add(self, index: int, deltas: list[Delta], logprobs: list[_Logprob]) -> None:
        self._deltas[index] += deltas
        self._logprobs[index] += logprobs

    def _chat_choice(self, choice: _Choice) -> dict[str, Any]:
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for delta in self._deltas[choice.index]:
            if isinstance(delta, TextDelta):
                text.append(delta.text)
            elif isinstance(delta, CallDelta):
                calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name}})
                arguments.append([])
            else:
                arguments[delta.index].append(delta.text)
        for call, parts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(parts)
        content = "".join(text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._choice_logprobs(choice),
            "finish_reason": choice.reason,
        }

    def _text_choice(self, choice: _Choice) -> dict[str, Any]:
        deltas = self._deltas[choice.index]
        return {
            "index": choice.index,
            "text": "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
            "logprobs": self._choice_logprobs(choice),
            "finish_reason": choice.reason,
        }

    def _choice_logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        return choice.logprobs(self._logprobs[choice.index]) if choice.wants_logprobs else None


class _Choice:
    """What one choice has said so far, and which logprobs wait for the text of their tokens."""

    __slots__ = (
        "chat",
        "index",
        "offset",
        "parser",
        "reason",
        "shown_bytes",
        "started",
        "token_bytes",
        "waiting",
        "wants_logprobs",
    )

    def __init__(
        self,
        index: int,
        request: ChatRequest | CompletionRequest,
        envelope: Envelope,
        tool_format: ToolFormat | None,
    ) -> None:
        self.index = index
        self.chat = isinstance(request, ChatRequest)
        self.started = False
        self.reason: str | None = None
        self.wants_logprobs = request.logprobs >= 0
        self.waiting: list[_Logprob] = []
        self.shown_bytes = 0
        self.token_bytes = 0
        self.offset = 0
        self.parser: ToolParser | None = None
        if isinstance(request, ChatRequest) and request.tools and tool_format is not None:
            self.parser = ToolParser(
                tool_format,
                {tool.name: tool.parameters for tool in request.tools},
                f"{envelope.call_id}/{index}",
                or_json=request.response_format != "text",
            )

    def take(self, text: str, logprobs: tuple[_Logprob, ...]) -> tuple[list[Delta], list[_Logprob]]:
        """Deltas and the logprobs that go with them."""
        if self.reason is not None:
            return [], []
        self.waiting += logprobs
        if self.parser is not None:
            return self.parser.push(text), self._released(text)
        return [TextDelta(text)] if text else [], self._released(text)

    def end(self, event: ChoiceEnd) -> tuple[list[Delta], list[_Logprob]]:
        deltas, logprobs = self.take(event.text, ())
        if self.parser is not None:
            deltas += self.parser.finish()
        if event.by != "stop_string":
            logprobs += self.waiting
        self.waiting = []
        called = self.parser is not None and self.parser.called
        self.reason = "tool_calls" if called and event.reason == "stop" else event.reason
        return deltas, logprobs

    def _released(self, text: str) -> list[_Logprob]:
        """Logprobs of the tokens whose text has begun to show: a stop string's own tokens never do."""
        if not self.wants_logprobs:
            return []
        self.shown_bytes += len(text.encode())
        count = 0
        for _, _, raw, _ in self.waiting:
            if self.token_bytes >= self.shown_bytes:
                break
            self.token_bytes += len(raw)
            count += 1
        released, self.waiting = self.waiting[:count], self.waiting[count:]
        return released

    def logprobs(self, entries: list[_Logprob]) -> dict[str, Any]:
        """In the endpoint's own shape. Completions count `text_offset` in characters of the answer."""
        if self.chat:
            return {"content": [_chat_logprob(entry) for entry in entries], "refusal": None}
        offsets = []
        for piece, _, _, _ in entries:
            offsets.append(self.offset)
            self.offset += len(piece)
        return {
            "tokens": [piece for piece, _, _, _ in entries],
            "token_logprobs": [_finite(value) for _, value, _, _ in entries],
            "top_logprobs": [{p: _finite(v) for p, v, _ in top} for _, _, _, top in entries],
            "text_offset": offsets,
        }


def _chat_delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    if isinstance(delta, CallDelta):
        function = {"name": delta.name, "arguments": ""}
        return {
            "tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]
        }
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _chat_logprob(entry: _Logprob) -> dict[str, Any]:
    piece, value, raw, top = entry
    return {
        "token": piece,
        "logprob": _finite(value),
        "bytes": list(raw),
        "top_logprobs": [{"token": p, "logprob": _finite(v), "bytes": list(b)} for p, v, b in top],
    }


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
