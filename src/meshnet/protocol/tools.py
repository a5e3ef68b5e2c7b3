"""How models write tool calls: the formats, told from a chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

PARAMETER_NAME = re.compile(r"[^<>\n]{1,256}")
PARAMETER_END = "</parameter>"
"""Of tagged formats: what a parameter's name may be, and what its value ends with."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    `opener` begins them and `closer` ends them; `bare` formats have no opener: JSON at the very start of the
    text, or after `opener`, which is then optional. `in_list`: the calls of one opener are a JSON list.
    A call is a JSON object with `name` and `arguments_key`; or, with `args_marker`, the bare name, the
    marker and the arguments; or, where `tagged`, `<function=NAME>` with `<parameter=NAME>` for each value.
    `markers` may be control tokens of the vocabulary: where tools are used, the node must turn those into
    text.
    """

    name: str
    opener: str = ""
    closer: str = ""
    bare: bool = False
    in_list: bool = False
    args_marker: str = ""
    tagged: bool = False
    arguments_key: str = "arguments"
    short_ids: bool = False
    """Ids of 9 letters and digits, which is what Mistral's templates insist on."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(part for part in (self.opener, self.closer, self.args_marker) if part)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
TAGGED = ToolFormat("tagged", "<tool_call>", "</tool_call>", tagged=True)
LLAMA = ToolFormat("llama", "<|python_tag|>", bare=True, arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", in_list=True, short_ids=True)
MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", args_marker="[ARGS]", short_ids=True)
GENERIC = ToolFormat("generic", bare=True)
"""For templates with tools in a way not known here: a JSON object per call, as the whole answer."""


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template makes its model write; None where it does nothing with tools."""
    if not re.search(r"\btools\b", chat_template):
        return None
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL_ARGS if "[ARGS]" in chat_template else MISTRAL
    if "<tool_call>" in chat_template:
        return TAGGED if "<function=" in chat_template else HERMES
    if "<|python_tag|>" in chat_template or "<|start_header_id|>" in chat_template:
        return LLAMA
    return GENERIC


def is_text(schema: Any, parameters: Any) -> bool:
    """Whether a property may be a string, so that its value in tags is taken as it stands."""
    if not isinstance(schema, dict):
        return schema is True
    target = schema.get("$ref")
    if isinstance(target, str):
        group, _, name = target.removeprefix("#/").partition("/")
        found = parameters.get(group, {}).get(name) if group in ("$defs", "definitions") else None
        return is_text(found, {}) if isinstance(found, dict) else False
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return any(is_text(part, parameters) for part in schema[keyword])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return isinstance(values, list) and any(isinstance(value, str) for value in values)
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)
