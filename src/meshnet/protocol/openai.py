"""The OpenAI request bodies: strict decoding, validation, and the normalised form that nodes get.

`parse_chat` and `parse_completion` take the raw body. Every parameter does what it says or is refused
with an `ApiError` (status 400) that names it: unknown parameters, parameters of OpenAI's that meshnet
does not have (unless their value asks for nothing), wrong types (a boolean is no number) and values out
of range. What comes out is a `ChatRequest` or `CompletionRequest` without any optional wire shape left:
the front door renders by it, and `to_request()` is what travels in `GenerateCall.request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from meshnet.protocol.bodies import (
    AssistantMessage,
    AudioPart,
    Body,
    ChatBody,
    Choice,
    CompletionBody,
    FilePart,
    FunctionMessage,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    RefusalPart,
    TextPart,
    ToolMessage,
    UserMessage,
)
from meshnet.protocol.errors import ApiError
from meshnet.protocol.refusals import missing, refused, translate
from meshnet.protocol.schema import check_schema

__all__ = [
    "ApiError",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "FunctionTool",
    "GenerationRequest",
    "Limits",
    "ToolCall",
    "chat_from_request",
    "check_tools",
    "completion_from_request",
    "parse_chat",
    "parse_completion",
]


@dataclass(frozen=True)
class Limits:
    """What a front door takes at most. `n_vocab`: the model's, where the caller knows it."""

    messages: int = 4096
    tools: int = 128
    n_vocab: int | None = None


# ---------------------------------------------------------------- normalised requests


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier; `arguments` is the JSON text as it was."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """role: system (developer too), user, assistant or tool. Text parts are joined by newlines."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is its JSON schema (None: any object)."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What both endpoints share. Neutral values: no limit, no penalty, no filter."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """0 .. 2^64-1; a negative seed of the client's is taken modulo 2^64."""
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int = -1
    """-1: none wanted; 0..20: the chosen token's and that many alternatives."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    stream: bool = False
    include_usage: bool = False
    user: str = ""
    metadata: dict[str, str] = {}

    def to_request(self) -> dict[str, Any]:
        """JSON-ready; defaults are left out. Read back by `chat_from_request` and its sibling."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class ChatRequest(GenerationRequest, frozen=True, omit_defaults=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    response_format: str = "text"
    """text, json_object or json_schema."""
    schema: Any = None
    """Of json_schema: the schema itself (an object, or a boolean)."""
    tools: tuple[FunctionTool, ...] = ()
    """Empty when tool_choice is none: the model is then not told of them."""
    tool_choice: str = "auto"
    """auto, required, or `function:NAME`."""
    parallel_tool_calls: bool = True

    def template_messages(self) -> list[dict[str, Any]]:
        """As chat templates read them: content is always a string, arguments are parsed objects."""
        return [_template_message(message) for message in self.messages]

    def template_tools(self) -> list[dict[str, Any]] | None:
        """In OpenAI's shape, which is the one chat templates expect; None without tools."""
        return [_template_tool(tool) for tool in self.tools] or None


class CompletionRequest(GenerationRequest, frozen=True, omit_defaults=True, kw_only=True):
    prompt: str | tuple[int, ...]
    """Text, or token ids (>= 0; the node refuses those beyond its vocabulary)."""


def chat_from_request(request: dict[str, Any]) -> ChatRequest:
    """The inverse of `to_request`; raises msgspec.ValidationError on anything else."""
    return msgspec.convert(request, ChatRequest)


def completion_from_request(request: dict[str, Any]) -> CompletionRequest:
    """The inverse of `to_request`; raises msgspec.ValidationError on anything else."""
    return msgspec.convert(request, CompletionRequest)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """Templates write arguments with `tojson`; text that is no JSON object stays the string it is."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _template_tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

_decode_chat = msgspec.json.Decoder(ChatBody).decode
_decode_completion = msgspec.json.Decoder(CompletionBody).decode


# ---------------------------------------------------------------- parsing


def parse_chat(body: bytes, limits: Limits = Limits()) -> ChatRequest:
    """The request of `/v1/chat/completions`. Raises ApiError (400) naming the parameter."""
    wire = _decode(_decode_chat, body)
    _refuse_unless_neutral(wire, CHAT_NEUTRAL)
    tools, choice = _tools(wire, limits)
    form, schema = _response_format(wire.response_format)
    if wire.stop:
        _refuse_stop(form, tools, choice)
    return ChatRequest(
        messages=_messages(wire.messages, limits),
        max_tokens=_max_tokens(wire),
        logprobs=_chat_logprobs(wire),
        response_format=form,
        schema=schema,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        **_shared(wire, limits),
    )


def parse_completion(body: bytes, limits: Limits = Limits()) -> CompletionRequest:
    """The request of `/v1/completions`. Raises ApiError (400) naming the parameter."""
    wire = _decode(_decode_completion, body)
    _refuse_unless_neutral(wire, COMPLETION_NEUTRAL)
    if wire.best_of is not None and wire.n not in (None, 1):
        raise refused("best_of", "best_of must not be smaller than n, and only 1 is supported")
    return CompletionRequest(
        prompt=_prompt(wire.prompt, limits),
        max_tokens=wire.max_tokens,
        logprobs=-1 if wire.logprobs is None else wire.logprobs,
        **_shared(wire, limits),
    )


def check_tools(request: ChatRequest, template_has_tools: bool) -> None:
    """Raises ApiError (400) where tools are used, or were, and the model's chat template has none."""
    if template_has_tools:
        return
    if request.tools:
        param = "tools"
    elif any(message.tool_calls or message.role == "tool" for message in request.messages):
        param = "messages"
    else:
        return
    raise ApiError(
        400,
        f"Model '{request.model}' cannot use tools: its chat template has none. Leave out tools and tool "
        "messages, or choose a model whose entry in /api/models has tools: true.",
        code="unsupported_parameter",
        param=param,
    )


def _decode(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise translate(str(error), body) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _refuse_unless_neutral(wire: Any, neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = getattr(wire, name)
        if value is None or any(value == v and type(value) is type(v) for v in values):
            continue
        only = " or ".join(["null", *(msgspec.json.encode(v).decode() for v in values)])
        raise ApiError(
            400,
            f"'{name}' is not supported here; leave it out (or send {only}).",
            code="unsupported_parameter",
            param=name,
        )


def _shared(wire: Body, limits: Limits) -> dict[str, Any]:
    """The parameters of both endpoints; what the client left out, or sent as null, takes its default."""
    out: dict[str, Any] = {"model": wire.model}
    for name in _PLAIN:
        value = getattr(wire, name)
        if value is not None:
            out[name] = value
    if wire.top_k is not None and wire.top_k > 0:
        out["top_k"] = wire.top_k
    if wire.seed is not None:
        if not -(2**63) <= wire.seed < 2**64:
            raise refused("seed", f"seed must be a 64-bit integer, not {wire.seed}")
        out["seed"] = wire.seed % 2**64
    if wire.stop:
        out["stop"] = _stops(wire.stop)
    if wire.logit_bias:
        out["logit_bias"] = _logit_bias(wire.logit_bias, limits)
    if wire.stream_options is not None:
        if not wire.stream:
            raise refused("stream_options", "stream_options is only allowed when stream is true")
        if wire.stream_options.include_obfuscation:
            raise ApiError(
                400,
                "Obfuscated streams are not supported; leave out stream_options.include_obfuscation.",
                code="unsupported_parameter",
                param="stream_options.include_obfuscation",
            )
        out["include_usage"] = wire.stream_options.include_usage is True
    return out


_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "stream",
    "user",
    "metadata",
)


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for index, text in enumerate(stops):
        if not text:
            raise refused(f"stop[{index}]", "a stop string must not be empty")
    return stops


def _logit_bias(bias: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise refused(f"logit_bias.{key}", f"a key of logit_bias is a token id, not '{key}'")
        token = int(key)
        if limits.n_vocab is not None and token >= limits.n_vocab:
            raise refused(f"logit_bias.{key}", f"the model's token ids go from 0 to {limits.n_vocab - 1}")
        pairs.append((token, value))
    return tuple(pairs)


def _max_tokens(wire: ChatBody) -> int | None:
    old, new = wire.max_tokens, wire.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused(
            "max_tokens",
            f"max_tokens ({old}) and max_completion_tokens ({new}) say different things; send one of them",
        )
    return old if new is None else new


def _chat_logprobs(wire: ChatBody) -> int:
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs: true")
    return -1


def _refuse_stop(form: str, tools: tuple[FunctionTool, ...], choice: str) -> None:
    """What a grammar promises to complete must not be cut by a stop string inside it."""
    if form != "text":
        other = "response_format"
    elif tools and (choice != "auto" or any(tool.strict for tool in tools)):
        other = "strict tools and a forced tool_choice"
    else:
        return
    raise ApiError(
        400,
        f"Invalid 'stop': a stop string could cut the JSON that is asked for; leave out stop or {other}.",
        code="unsupported_value",
        param="stop",
    )


def _response_format(form: Any) -> tuple[str, Any]:
    if isinstance(form, JsonObjectFormat):
        return "json_object", None
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema
        if schema is UNSET:
            raise missing("response_format.json_schema.schema")
        check_schema(schema, param="response_format.json_schema.schema")
        return "json_schema", schema
    return "text", None


def _tools(wire: ChatBody, limits: Limits) -> tuple[tuple[FunctionTool, ...], str]:
    choice = wire.tool_choice
    if not wire.tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", "tool_choice needs tools")
        if wire.parallel_tool_calls is not None:
            raise refused("parallel_tool_calls", "parallel_tool_calls needs tools")
        return (), "auto"
    if len(wire.tools) > limits.tools:
        raise refused("tools", f"at most {limits.tools} tools are taken, not {len(wire.tools)}")
    names: set[str] = set()
    tools = []
    for index, tool in enumerate(wire.tools):
        function = tool.function
        if function.name in names:
            raise refused(f"tools[{index}].function.name", f"two functions are named '{function.name}'")
        names.add(function.name)
        if function.strict and function.parameters is not None:
            check_schema(function.parameters, param=f"tools[{index}].function.parameters")
        tools.append(
            FunctionTool(
                function.name, function.description or "", function.parameters, function.strict is True
            )
        )
    if choice == "none":
        return (), "auto"
    if isinstance(choice, Choice):
        if choice.function.name not in names:
            raise refused("tool_choice", f"tool_choice names '{choice.function.name}', which is not in tools")
        return tuple(tools), f"function:{choice.function.name}"
    if choice not in (None, "auto", "required"):
        raise refused("tool_choice", f"tool_choice is none, auto, required or a function, not '{choice}'")
    return tuple(tools), choice or "auto"


def _prompt(prompt: str | list[str | int | list[int]], limits: Limits) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise refused("prompt", "prompt must not be an empty list")
    tokens: list[Any]
    if isinstance(prompt[0], int):
        tokens, where = list(prompt), "prompt"
    elif len(prompt) > 1:
        raise refused(
            "prompt", f"one prompt per request is taken, not {len(prompt)}; send a request for each"
        )
    elif isinstance(prompt[0], str):
        return prompt[0]
    else:
        tokens, where = prompt[0], "prompt[0]"
    if not tokens:
        raise refused(where, "a prompt of token ids must not be empty")
    for index, token in enumerate(tokens):
        if not isinstance(token, int):
            raise refused(f"{where}[{index}]", "a prompt is text or token ids, not both", code="invalid_type")
        if not 0 <= token < (limits.n_vocab or 2**31):
            raise refused(f"{where}[{index}]", f"{token} is no token id of the model")
    return tuple(tokens)


# ---------------------------------------------------------------- messages


def _messages(messages: list[Any], limits: Limits) -> tuple[ChatMessage, ...]:
    if len(messages) > limits.messages:
        raise refused("messages", f"at most {limits.messages} messages are taken, not {len(messages)}")
    out = []
    open_calls: dict[str, None] = {}
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_calls:
                raise refused(
                    f"{at}.tool_call_id",
                    f"'{message.tool_call_id}' answers no open tool call of the assistant message before it",
                )
            del open_calls[message.tool_call_id]
            content = _text(message.content, at)
            out.append(ChatMessage("tool", content, (), message.tool_call_id, message.name or ""))
            continue
        _all_answered(open_calls, at)
        if isinstance(message, AssistantMessage):
            calls = _made_calls(message, at)
            open_calls = {call.id: None for call in calls}
            out.append(ChatMessage("assistant", _assistant_text(message, at), calls, "", message.name or ""))
        elif isinstance(message, FunctionMessage):
            raise refused(f"{at}.role", "the role function is gone from OpenAI's interface; use tool")
        else:
            role = "user" if isinstance(message, UserMessage) else "system"
            out.append(ChatMessage(role, _text(message.content, at), (), "", message.name or ""))
    _all_answered(open_calls, f"messages[{len(messages) - 1}]")
    return tuple(out)


def _all_answered(open_calls: dict[str, None], at: str) -> None:
    if open_calls:
        ids = ", ".join(f"'{call}'" for call in open_calls)
        raise refused(at, f"tool calls without a tool message that answers them: {ids}")


def _text(content: str | list[Any], at: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise refused(f"{at}.content", "a list of content parts must not be empty")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        kind = _PART_NAMES[type(part)]
        raise ApiError(
            400,
            f"{kind} are not supported in {at}.content[{index}]: this model reads text only.",
            code="unsupported_value",
            param=f"{at}.content[{index}].type",
        )
    return "\n".join(texts)


_PART_NAMES: dict[type, str] = {
    ImagePart: "Images (image_url)",
    AudioPart: "Audio inputs (input_audio)",
    FilePart: "Files (file)",
    RefusalPart: "Refusals outside assistant messages",
}


def _assistant_text(message: AssistantMessage, at: str) -> str:
    for name in ("annotations", "audio", "function_call"):
        if getattr(message, name) not in (None, []):
            raise ApiError(
                400,
                f"'{at}.{name}' is not supported; leave it out.",
                code="unsupported_parameter",
                param=f"{at}.{name}",
            )
    content = message.content
    if content is None:
        if message.refusal is not None:
            return message.refusal
        if not message.tool_calls:
            raise refused(f"{at}.content", "an assistant message has content or tool_calls")
        return ""
    if isinstance(content, list):
        content = [TextPart(p.refusal) if isinstance(p, RefusalPart) else p for p in content]
    return _text(content, at)


def _made_calls(message: AssistantMessage, at: str) -> tuple[ToolCall, ...]:
    calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
    if len({call.id for call in calls}) != len(calls):
        raise refused(f"{at}.tool_calls", "two tool calls have the same id")
    return calls
