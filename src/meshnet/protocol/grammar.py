"""Which grammar a chat request puts on the model's text: a response format's, a tool call's, or both.

A forced call is written exactly as the model's format writes it. Where calls are optional but must hold
something (a strict function, no more than one call, JSON as the other answer), the grammar lets free text
through up to the format's opener and takes over from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet.protocol.errors import ApiError, SchemaError
from meshnet.protocol.gbnf import GrammarError, Rules, either, literal
from meshnet.protocol.openai import ChatRequest, FunctionTool
from meshnet.protocol.schema import SchemaRules
from meshnet.protocol.schema_merge import ANNOTATIONS
from meshnet.protocol.tools import PARAMETER_END, PARAMETER_NAME, ToolFormat, is_text

_BARE_START = "{ \t\r\n"
_ANY_CHAR = "[^\\U0010FFFF]"


@dataclass(frozen=True)
class GrammarSpec:
    """`gbnf`: empty for no grammar. `show_control`: the node must turn control tokens (other than those
    that end the generation) into their text, because the grammar or the tool parser reads them as text.
    """

    gbnf: str = ""
    show_control: bool = False


def grammar_for(request: ChatRequest, form: ToolFormat | None) -> GrammarSpec:
    """The grammar of one request; `form` is the model's tool format, where it has one.

    Raises ApiError (400) where tools ask for more than a grammar can hold.
    """
    if not request.tools or form is None:
        if request.response_format == "text":
            return GrammarSpec()
        return GrammarSpec(_text(request, None), show_control=True)
    optional = request.tool_choice == "auto"
    constrained = (
        not request.parallel_tool_calls
        or request.response_format != "text"
        or any(tool.strict for tool in request.tools)
    )
    if optional and not constrained:
        return GrammarSpec(show_control=True)
    return GrammarSpec(_text(request, form), show_control=True)


def _text(request: ChatRequest, form: ToolFormat | None) -> str:
    rules = Rules()
    param = "response_format"
    try:
        answer = "" if request.response_format == "text" else _json(rules, request)
        if form is None:
            return rules.text(answer)
        param = "tools"
        calls = _Calls(rules, request, form)
        if request.tool_choice != "auto":
            root = calls.all(opened=False)
        elif answer:
            root = f"{answer} | {calls.all(opened=False)}"
        else:
            root = calls.after_text()
        return rules.text(root)
    except SchemaError as error:
        where = f" at '#{error.path}'" if error.path else ""
        raise ApiError(
            400, f"Invalid '{param}': {error}{where}.", code="invalid_schema", param=param
        ) from None
    except GrammarError as error:
        raise ApiError(400, f"Invalid '{param}': {error}.", code="invalid_schema", param=param) from None


def _json(rules: Rules, request: ChatRequest) -> str:
    schema = request.schema if request.response_format == "json_schema" else {"type": "object"}
    return SchemaRules(rules, schema).root()


class _Calls:
    """The rules of the calls that a request allows."""

    def __init__(self, rules: Rules, request: ChatRequest, form: ToolFormat) -> None:
        self._rules = rules
        self._form = form
        kind, _, name = request.tool_choice.partition(":")
        self._tools = [tool for tool in request.tools if kind != "function" or tool.name == name]
        self._any_text = ""
        self._several = request.parallel_tool_calls and kind != "function"

    def all(self, *, opened: bool) -> str:
        """One call or more; `opened`: the first opener stands already."""
        form = self._form
        call = self._rules.name(either(self._one(tool) for tool in self._tools), "call")
        opener = "" if form.bare else literal(form.opener)
        first = "" if opened else opener
        if form.in_list:
            more = f'(", " {call})*' if self._several else ""
            return f'{first} "[" {call} {more} "]"'
        if form.args_marker:
            more = f"({opener} {call})*" if self._several else ""
        elif form.bare:
            more = ""
        else:
            more = f'("\\n" {opener} {call})*' if self._several else ""
        return f"{first} {call} {more}".strip()

    def after_text(self) -> str:
        """Free text and then, or instead, calls. In a bare format, text that begins like a call is one."""
        form = self._form
        if not form.bare:
            return self._until(form.opener, self.all(opened=True))[0]
        if form.opener:
            text = self._until(form.opener, self.all(opened=True))[1]
        else:
            text = f"[^{_excluded(_BARE_START)}] {_ANY_CHAR}*"
        return f"[ \\t\\r\\n]* ({self.all(opened=False)} | {text})?"

    def _one(self, tool: FunctionTool) -> str:
        form = self._form
        if form.tagged:
            return self._tagged(tool)
        arguments = _arguments(self._rules, tool)
        if form.args_marker:
            return f"{literal(tool.name + form.args_marker)} {arguments}"
        head = literal(f'{{"name": "{tool.name}", "{form.arguments_key}": ')
        if form.closer:
            tail = literal("}\n" + form.closer)
            return f'"\\n" {head} {arguments} {tail}'
        return f'{head} {arguments} "}}"'

    def _tagged(self, tool: FunctionTool) -> str:
        """A tag for each property, in the schema's order; text stands as it is, other values as JSON."""
        parameters = tool.parameters or {}
        if tool.strict:
            _refuse_untaggable(parameters)
        properties = parameters.get("properties")
        required = parameters.get("required")
        parts = []
        properties = properties if isinstance(properties, dict) else {}
        if tool.strict:
            for name in [*properties, *(required if isinstance(required, list) else ())]:
                if name not in properties or not PARAMETER_NAME.fullmatch(name):
                    raise SchemaError(f"this model's tool format cannot hold the property '{name}'", "")
        for name, schema in properties.items():
            if not PARAMETER_NAME.fullmatch(name):
                continue
            try:
                value = self._tagged_value(schema, parameters, tool.strict)
            except (SchemaError, GrammarError):
                if tool.strict:
                    raise
                value = self._tag_text()
            needed = isinstance(required, list) and name in required
            part = self._rules.name(literal(f"<parameter={name}>\n") + " " + value, "parameter")
            parts.append(part if needed else f"{part}?")
        closing = literal(f"</function>\n{self._form.closer}")
        return " ".join([literal(f"\n<function={tool.name}>\n"), *parts, closing])

    def _tagged_value(self, schema: Any, parameters: dict[str, Any], strict: bool) -> str:
        ends = literal(f"\n{PARAMETER_END}\n")
        if not is_text(schema, parameters):
            return f"{SchemaRules(self._rules, parameters).part(schema)} {ends}"
        constants = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(constants, list) and all(isinstance(text, str) for text in constants):
            kept = [text for text in constants if PARAMETER_END not in text and text.strip("\n") == text]
            if kept:
                return f"{either(literal(text) for text in kept)} {ends}"
        if strict and not _plain_text(schema):
            raise SchemaError("this model's tool format holds plain strings and enums of strings only", "")
        return self._tag_text()

    def _tag_text(self) -> str:
        """Any text up to the end of the parameter."""
        if not self._any_text:
            self._any_text = self._until(PARAMETER_END, literal("\n"), may_end=False)[0]
        return self._any_text

    def _until(self, opener: str, then: str, *, may_end: bool = True) -> tuple[str, str]:
        """Text without the opener, which may end anywhere unless told otherwise, or the opener and then
        `then`: as one rule, and as one that begins with a visible character other than a brace.

        One rule per length of the opener's beginning that the text ends with (Knuth, Morris, Pratt 1977).
        """
        rules = self._rules
        after = rules.name(then, "calls")
        states = [rules.reserve("text") for _ in opener]
        alphabet = sorted(set(opener))
        steps: dict[tuple[int, str], str] = {}
        for size, state in enumerate(states):
            for char in alphabet:
                reached = _overlap(opener[:size] + char, opener)
                following = after if reached == len(opener) else states[reached]
                steps[size, char] = f"{literal(char)} {following}"
            options = [steps[size, char] for char in alphabet]
            ends = ['""'] if may_end else []
            rules.define(state, " | ".join([*ends, f"[^{_excluded(opener)}] {states[0]}", *options]))
        visible = [f"[^{_excluded(opener + _BARE_START)}] {states[0]}"]
        visible += [steps[0, char] for char in alphabet if char not in _BARE_START]
        return states[0], rules.name(" | ".join(visible), "text")


def _excluded(chars: str) -> str:
    return "".join(f"\\U{ord(char):08X}" for char in sorted(set(chars)))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    return next(size for size in range(len(text), -1, -1) if marker.startswith(text[len(text) - size :]))


def _arguments(rules: Rules, tool: FunctionTool) -> str:
    """The arguments of a strict function hold its schema; of another one as much of it as a grammar can."""
    parameters = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    schema = {"type": "object", **parameters}
    if tool.strict:
        return SchemaRules(rules, schema).root()
    try:
        return SchemaRules(Rules(), schema).root() and SchemaRules(rules, schema).root()
    except (SchemaError, GrammarError):
        return SchemaRules(rules, _loosened(schema)).root()


def _refuse_untaggable(parameters: dict[str, Any]) -> None:
    """Beside its properties the schema of a strict function says nothing that tags cannot hold."""
    for keyword in parameters:
        if keyword not in ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}:
            raise SchemaError(f"this model's tool format cannot hold '{keyword}'", "", keyword)


def _plain_text(schema: Any) -> bool:
    """Whether any text validates."""
    if not isinstance(schema, dict):
        return schema is True
    return all(key in ANNOTATIONS or (key == "type" and schema[key] == "string") for key in schema)


def _loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """The top level's properties, each with its schema where a grammar can hold that, else with any value."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    loose: dict[str, Any] = {"type": "object", "properties": {}}
    for name, part in properties.items():
        trial: dict[str, Any] = {"type": "object", "properties": {name: part}, **definitions}
        try:
            SchemaRules(Rules(), trial).root()
            loose["properties"][name] = part
        except (SchemaError, GrammarError):
            loose["properties"][name] = True
    if isinstance(required, list):
        loose["required"] = [name for name in required if name in loose["properties"]]
    if not properties:
        return {"type": "object"}
    return {**loose, **definitions}
