"""Chat templates: Jinja2 from a model's file, run in a sandbox, with the names that such templates use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshnet.engine.tokenizer import Tokenizer

MAX_SOURCE = 1 << 20
MAX_OUTPUT = 32 << 20


class TemplateError(Exception):
    """The template is broken, or refuses the messages; the message says why."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """One model's template. Thread-safe. Raises TemplateError for a source that is no template."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has more than {MAX_SOURCE} characters")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = environment.parse(source).find_all(nodes.Name)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error
        self.has_tools = any(name.name == "tools" for name in names)
        self._names = {
            "bos_token": _text(tokenizer, tokenizer.bos),
            "eos_token": _text(tokenizer, tokenizer.eos),
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat, up to where the model is to answer. Raises TemplateError."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._names
            ):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise TemplateError(f"the chat template gives more than {MAX_OUTPUT} characters")
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateError(str(error)) from error
        return "".join(parts)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
