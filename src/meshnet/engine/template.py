"""Chat templates: the Jinja text that a model carries, rendered into its prompt.

A template comes with a downloaded file, so it runs in Jinja's immutable sandbox and within bounds: a deadline
that every loop looks at, and a limit on the size of anything that it builds.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshnet.engine.tokenizer import Tokenizer

DEADLINE_S = 2.0
MAX_SOURCE = 1 << 20
MAX_SIZE = 4 << 20
"""Characters of the output and of any string on the way to it, and items of any list."""
MAX_NUMBER = 1 << 20
"""Largest integer that may be handed to a function or filter, where it could be a size."""
MAX_POWER = 64

_LOOP, _JOINED = "loop guard", "bounded join"
"""Names of filters that no template can write."""


class TemplateError(Exception):
    """A template, or what was put into it, is at fault; the message says how and can be shown to a user."""


class _Deadline(threading.local):
    at = 0.0

    def check(self) -> None:
        if time.monotonic() > self.at:
            raise TemplateError(
                f"the chat template ran for more than {DEADLINE_S:g} s; simplify the messages"
            )


_deadline = _Deadline()


def _too_large() -> TemplateError:
    return TemplateError(f"the chat template built something larger than {MAX_SIZE} characters or items")


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > MAX_SIZE:
        raise _too_large()
    return value


def _check_numbers(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_NUMBER:
            raise TemplateError(f"the chat template asks for a size of {argument}, more than {MAX_NUMBER}")


def _check_format(text: str) -> None:
    """A format string must not ask for a width that is a size in itself."""
    if re.search(r"[%{][^%{}]*(\d{6}|\*)", text):
        raise TemplateError("the chat template formats to a width of 100,000 or more")


class _Guarded:
    """An iterable that looks at the deadline at every turn, and still has a length where it had one."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _deadline.check()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _guard(items: Any) -> Any:
    return _Guarded(items) if hasattr(items, "__len__") else iter(_Guarded(items))


def _join(parts: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    """Jinja's `join`, which adds up the lengths before it builds anything."""
    texts = []
    size = 0
    for part in parts:
        _deadline.check()
        text = str(part[attribute] if attribute is not None else part)
        size += len(text) + len(separator)
        if size > MAX_SIZE:
            raise _too_large()
        texts.append(text)
    return separator.join(texts)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what a model wrote; here the text in it is just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join
        self.filters = {name: _bound_filter(function) for name, function in self.filters.items()}
        self.filters[_LOOP] = _guard
        self.filters[_JOINED] = _join
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        _replace_concat(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _deadline.check()
        if operator == "*":
            for sized, number in ((left, right), (right, left)):
                countable = isinstance(sized, (str, list, tuple)) and isinstance(number, int)
                if countable and len(sized) * number > MAX_SIZE:
                    raise _too_large()
        elif operator == "**":
            _check_numbers((left, right))
            if isinstance(right, (int, float)) and abs(right) > MAX_POWER:
                raise TemplateError(f"the chat template raises a number to a power beyond {MAX_POWER}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _deadline.check()
        _check_numbers((*args, *kwargs.values()))
        return _bounded(super().call(context, function, *args, **kwargs))


def _replace_concat(node: nodes.Node) -> None:
    """Turns `a ~ b` into a filter that knows the limit, everywhere below `node`."""

    def replaced(child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        _replace_concat(child)
        if not isinstance(child, nodes.Concat):
            return child
        parts = nodes.List(child.nodes, lineno=child.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=child.lineno)

    for name, value in node.iter_fields():
        setattr(
            node, name, [replaced(each) for each in value] if isinstance(value, list) else replaced(value)
        )


_FORMAT = FILTERS["format"]


def _bound_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _deadline.check()
        _check_numbers((*args, *kwargs.values()))
        if function is _FORMAT and args:
            _check_format(str(args[0]))
        return _bounded(function(*args, **kwargs))

    # jinja2 marks filters that want the context or the environment as their first argument
    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(bounded, mark, getattr(function, mark))
    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


_environment = _Environment()


class ChatTemplate:
    """One model's template, compiled. May be used from several threads at once.

    `tokenizer` gives the texts of `bos_token` and `eos_token`. Raises TemplateError for a source that is no
    template.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}")
        try:
            self._template = _environment.from_string(source)
            names = find_undeclared_variables(_environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error
        self.has_tools: bool = "tools" in names
        """Whether the template does something with tools."""
        self._tokens = {
            "bos_token": _text(tokenizer, tokenizer.bos),
            "eos_token": _text(tokenizer, tokenizer.eos),
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat, up to where the model is to answer; its control tokens are written out in it.

        `variables` are further names for the template (such as `enable_thinking`). Raises TemplateError for
        messages that the template refuses, and when it takes too long or gets too large.
        """
        _deadline.at = time.monotonic() + DEADLINE_S
        names: dict[str, Any] = {
            **(variables or {}),
            **self._tokens,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(names):
                _deadline.check()
                size += len(part)
                if size > MAX_SIZE:
                    raise TemplateError(f"the chat template's output is longer than {MAX_SIZE} characters")
                parts.append(part)
        except SecurityError as error:
            raise TemplateError(f"the chat template does what it must not: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateError(f"the chat template fails on these messages: {error}") from error
        except (RecursionError, ArithmeticError, MemoryError) as error:
            raise TemplateError(f"the chat template fails: {type(error).__name__}") from error
        return "".join(parts)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
