"""OpenAI's request bodies as they come over the wire: typed, strict, nothing unknown.

Optional parameters may be null. Ranges that hold for every model stand here; what hangs together with
other parameters or with the model is checked in `openai.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_CHOICES = 8
MAX_STOPS = 4


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class TextPart(_Strict, tag_field="type", tag="text"):
    text: str


class RefusalPart(_Strict, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    pass


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    pass


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    pass


_Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
_Content = str | list[_Part]
_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Identifier = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class SystemMessage(_Strict, tag_field="role", tag="system"):
    content: _Content
    name: _Name | None = None


class DeveloperMessage(_Strict, tag_field="role", tag="developer"):
    content: _Content
    name: _Name | None = None


class UserMessage(_Strict, tag_field="role", tag="user"):
    content: _Content
    name: _Name | None = None


class CalledFunction(_Strict):
    name: str
    arguments: str


class MadeCall(_Strict, tag_field="type", tag="function"):
    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction


class AssistantMessage(_Strict, tag_field="role", tag="assistant"):
    content: _Content | None = None
    name: _Name | None = None
    refusal: str | None = None
    tool_calls: list[MadeCall] | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(_Strict, tag_field="role", tag="tool"):
    content: _Content
    tool_call_id: str
    name: _Name | None = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function"):
    pass


_Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class Function(_Strict):
    name: _Identifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, tag_field="type", tag="function"):
    function: Function


class ChosenFunction(_Strict):
    name: str


class Choice(_Strict, tag_field="type", tag="function"):
    function: ChosenFunction


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(_Strict, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(_Strict, tag_field="type", tag="json_object"):
    pass


class NamedSchema(_Strict):
    name: _Identifier
    schema: dict[str, Any] | bool | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Strict, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


_PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Unit = Annotated[float, Meta(ge=0, le=1)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class Body(_Strict, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: _PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Unit | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: _PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool | None = None
    # Known to OpenAI, not to meshnet: taken only where the value asks for nothing (CHAT_NEUTRAL).
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # As above (COMPLETION_NEUTRAL).
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
