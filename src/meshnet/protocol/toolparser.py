"""Tool calls in the text that a model writes.

The parser is incremental: text comes in pieces cut anywhere, and what comes out does not depend on the
cuts. Markup (`<tool_call>`, `[TOOL_CALLS]`, `<|python_tag|>` and the JSON around the arguments) is never
emitted; the arguments are passed on as the model writes them, or, from formats that have them in tags,
written as JSON, parameter by parameter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from meshnet.protocol.tools import PARAMETER_END, PARAMETER_NAME, ToolFormat, is_text

_WS = " \t\r\n"
_MAX_HEADER = 512
"""Characters from the brace of a call to the brace of its arguments; longer ones are read as a whole."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FUNCTION = re.compile(r"<function=([a-zA-Z0-9_.-]{1,64})>")
_PARAMETER = re.compile(f"<parameter=({PARAMETER_NAME.pattern})>")
_FUNCTION_END = "</function>"
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')


@dataclass(frozen=True)
class TextDelta:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the arguments' JSON text of call `index`."""

    index: int
    text: str


Delta = TextDelta | CallDelta | ArgumentsDelta


class ToolParser:
    """Turns one choice's text into deltas.

    `functions`: the request's, with their parameters' schemas (None: any); they tell a bare call from an
    answer that happens to be JSON, and in tags text from numbers. `seed` makes the calls' ids and must be
    the choice's own. `or_json`: the answer is either calls from the start or JSON, in whose strings an
    opener is no opener.
    """

    def __init__(
        self, form: ToolFormat, functions: Mapping[str, Any], seed: str, *, or_json: bool = False
    ) -> None:
        self._form = form
        self._functions = functions
        self._name = ""
        self._values = 0
        self._seed = seed
        self._count = 0
        self._buffer = ""
        self._marked = not form.bare
        self._blank = False
        """Between a call and the next visible text, white space is markup."""
        self._gap = ""
        """White space before and after the last opener, for the case that no call follows."""
        self._finishing = False
        self._seeking = not or_json
        self._state = self._start if form.bare or or_json else self._text
        self._object = _ObjectEnd()
        self._scanned = 0
        self._out: list[Delta] = []

    @property
    def called(self) -> bool:
        """Whether at least one tool call has begun."""
        return self._count > 0

    def push(self, text: str) -> list[Delta]:
        """The deltas that this piece of text completes."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Delta]:
        """The text has ended: what was held back is decided now."""
        self._finishing = True
        out = self._run()
        self._buffer = ""
        return out

    def _run(self) -> list[Delta]:
        # A state takes from the buffer what it can and says whether another state should go on.
        while self._buffer and self._state():
            pass
        out, self._out = self._out, []
        return out

    # ---------------------------------------------------------------- states

    def _start(self) -> bool:
        """The beginning of a text that may be a call."""
        rest, opener = self._buffer.lstrip(_WS), self._form.opener
        undecided = not rest or (opener.startswith(rest) and rest != opener)
        if undecided and not self._finishing:
            return False
        if opener and rest.startswith(opener):
            self._open(rest[len(opener) :])
        else:
            bare_call = self._form.bare and rest.startswith("{")
            self._state = self._header if bare_call else self._text
        return True

    def _text(self) -> bool:
        """Text up to the next opener. White space before an opener belongs to the markup."""
        opener = self._form.opener if self._seeking else ""
        found = self._buffer.find(opener) if opener else -1
        if found >= 0:
            shown = self._buffer[:found].rstrip(_WS)
            self._say(shown)
            self._gap = self._buffer[len(shown) : found]
            self._open(self._buffer[found + len(opener) :])
            return True
        end = len(self._buffer)
        if opener and not self._finishing:
            end = len(self._buffer[: end - _begun(self._buffer, opener)].rstrip(_WS))
        self._say(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return False

    def _opened(self) -> bool:
        """After an opener: a call must follow."""
        rest = self._buffer.lstrip(_WS + ("[" if self._form.in_list else ""))
        if not rest:
            return False
        self._gap += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if self._form.tagged:
            self._state = self._function
        elif rest[0] == "{" or self._form.args_marker:
            self._state = self._header
        else:
            self._await_other()
        return True

    def _header(self) -> bool:
        """The beginning of a call, up to the first character of its arguments."""
        if self._form.args_marker:
            found = _marked_header(self._buffer, self._form.args_marker)
        else:
            found = _json_header(self._buffer, None if self._marked else frozenset(self._functions))
        if found is None and not self._finishing and len(self._buffer) < _MAX_HEADER:
            return False
        if not found or found[1] >= _MAX_HEADER:
            self._state = self._text
            if self._marked:
                self._await_other()
            return True
        name, size = found
        self._begin(name)
        self._buffer = self._buffer[size:]
        self._object = _ObjectEnd()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._object.find(self._buffer)
        taken = len(self._buffer) if end is None else end
        self._out.append(ArgumentsDelta(self._count - 1, self._buffer[:taken]))
        self._buffer = self._buffer[taken:]
        if end is None:
            return False
        self._object = _ObjectEnd(depth=1)
        self._state = self._after if self._form.args_marker else self._tail
        return True

    def _function(self) -> bool:
        """`<function=NAME>`, in tagged formats."""
        match = _FUNCTION.match(self._buffer)
        if match is None:
            if not self._finishing and _may_begin(self._buffer, "<function="):
                return False
            self._await_other()
            return True
        self._name, self._values = match.group(1), 0
        self._begin(self._name)
        self._out.append(ArgumentsDelta(self._count - 1, "{"))
        self._buffer = self._buffer[match.end() :]
        self._scanned = 0
        self._state = self._parameters
        return True

    def _parameters(self) -> bool:
        """`<parameter=NAME>`, the value and `</parameter>`, again and again, then `</function>`."""
        self._buffer = text = self._buffer.lstrip(_WS)
        if text.startswith(_FUNCTION_END):
            self._out.append(ArgumentsDelta(self._count - 1, "}"))
            self._buffer = text[len(_FUNCTION_END) :]
            self._state = self._after
            return True
        match = _PARAMETER.match(text)
        end = text.find(PARAMETER_END, max(0, self._scanned - len(PARAMETER_END)))
        self._scanned = len(text)
        if match is None or end < 0:
            if match is None and not _may_begin(text, "<parameter=") and not _FUNCTION_END.startswith(text):
                # What stands between two values belongs to none of them.
                following = text.find("<", 1)
                self._buffer = "" if following < 0 else text[following:]
                self._scanned = 0
                return True
            return False
        name = match.group(1)
        value = text[match.end() : end].removeprefix("\n").removesuffix("\n")
        written = _tagged_value(self._functions.get(self._name), name, value)
        separator = ", " if self._values else ""
        self._values += 1
        part = f"{separator}{msgspec.json.encode(name).decode()}: {written}"
        self._out.append(ArgumentsDelta(self._count - 1, part))
        self._buffer = text[end + len(PARAMETER_END) :]
        self._scanned = 0
        return True

    def _tail(self) -> bool:
        """What is left of the object around the arguments."""
        end = self._object.find(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        self._state = self._tail if end is None else self._after
        return end is not None

    def _after(self) -> bool:
        """After a call: its closer, another call, or text again."""
        form = self._form
        rest = self._buffer
        if self.called:
            rest = rest.lstrip(_WS + (",;" if form.in_list or form.bare else ""))
            self._blank = True
        self._buffer = rest
        closer = "]" if form.in_list else form.closer
        if not rest or (closer.startswith(rest) and rest != closer):
            return False  # at the end of the text: a closer that was cut off
        if rest[0] == "{" and not form.args_marker and not form.tagged:
            self._state = self._header
            return True
        if closer and rest.startswith(closer):
            self._buffer = rest[len(closer) :]
        self._state = self._text
        return True

    def _other(self) -> bool:
        """After an opener something that is no call in the usual order of keys: read as a whole, up to the
        closer or the end of the object, whichever comes first."""
        closer, text = self._form.closer, self._buffer
        if not closer and text[0] != "{":
            self._state = self._text
            return True
        ended = self._object.find(text, self._scanned) if text[0] == "{" else None
        found = text.find(closer, max(0, self._scanned - len(closer))) if closer else -1
        self._scanned = len(text)
        if ended is not None and (found < 0 or ended <= found):
            end = ended
        elif found >= 0:
            end = found
        elif self._finishing:
            end = len(text)
        else:
            return False
        whole, self._buffer = text[:end], text[end:]
        call = _whole_call(whole)
        if call is not None:
            self._begin(call[0])
            self._out.append(ArgumentsDelta(self._count - 1, call[1]))
        else:
            self._say(self._gap + whole)
        self._state = self._after
        return True

    # ---------------------------------------------------------------- effects

    def _open(self, rest: str) -> None:
        self._buffer = rest
        self._marked = True
        self._state = self._opened

    def _await_other(self) -> None:
        self._object = _ObjectEnd()
        self._scanned = 0
        self._state = self._other

    def _begin(self, name: str) -> None:
        self._seeking = True
        self._out.append(CallDelta(self._count, self._id(), name))
        self._count += 1
        self._blank = True
        self._gap = ""

    def _say(self, text: str) -> None:
        if self._blank:
            text = text.lstrip(_WS)
        if text:
            self._blank = False
            self._out.append(TextDelta(text))

    def _id(self) -> str:
        digest = hashlib.sha256(f"{self._seed}/{self._count}".encode()).hexdigest()
        return digest[:9] if self._form.short_ids else f"call_{digest[:24]}"


class _ObjectEnd:
    """Finds the end of a JSON object (or of what is left of one, from `depth`) in text cut anywhere."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Index after the object's last brace; None when it does not come. Reads on from `start`."""
        for index in range(start, len(text)):
            char = text[index]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                if char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def _begun(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


_Header = tuple[str, int] | tuple[()] | None
"""(name, index of the arguments' brace); () for no call; None while it may still become one."""


def _json_header(text: str, names: frozenset[str] | None) -> _Header:
    """`{"name": "NAME", "arguments": {`, with white space anywhere; NAME one of `names` unless None."""
    at, name = 0, ""
    for expected in ("{", '"name"', ":", "", ",", "key", ":"):
        at = _skip(text, at)
        if expected == "":
            if at < len(text) and text[at] != '"':
                return ()
            match = _NAME.match(text, at + 1)
            end = match.end() if match else at + 1
            if end >= len(text):
                return None
            if match is None or text[end] != '"':
                return ()
            name, at = match.group(), end + 1
            if names is not None and name not in names:
                return ()
            continue
        options = _ARGUMENT_KEYS if expected == "key" else (expected,)
        rest = text[at:]
        hit = next((option for option in options if rest.startswith(option)), None)
        if hit is None:
            return None if any(option.startswith(rest) for option in options) else ()
        at += len(hit)
    at = _skip(text, at)
    if at >= len(text):
        return None
    return (name, at) if text[at] == "{" else ()


def _marked_header(text: str, marker: str) -> _Header:
    """`NAME[ARGS]{`, perhaps with `[CALL_ID]ID` between name and marker."""
    match = re.match(r"([a-zA-Z0-9_.-]{1,64})(\[CALL_ID\][a-zA-Z0-9]{0,64})?", text)
    if match is None:
        return ()
    rest = text[match.end() :]
    if not rest.startswith(marker):
        return None if marker.startswith(rest) or "[CALL_ID]".startswith(rest) else ()
    at = _skip(text, match.end() + len(marker))
    if at >= len(text):
        return None
    return (match.group(1), at) if text[at] == "{" else ()


def _may_begin(text: str, tag: str) -> bool:
    """Whether text, which is not yet the whole of a tag with a name in it, may still become one."""
    return (tag.startswith(text) or text.startswith(tag)) and len(text) < _MAX_HEADER and ">" not in text


def _tagged_value(parameters: Any, name: str, text: str) -> str:
    """A value in tags as JSON: by the property's schema, text as it stands, anything else as JSON is."""
    parameters = parameters if isinstance(parameters, dict) else {}
    properties = parameters.get("properties")
    schema = properties.get(name, True) if isinstance(properties, dict) else True
    if not is_text(schema, parameters):
        try:
            return msgspec.json.encode(msgspec.json.decode(text)).decode()
        except (msgspec.DecodeError, RecursionError):
            pass
    return msgspec.json.encode(text).decode()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WS:
        at += 1
    return at


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call object with its keys in any order."""
    try:
        call: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], msgspec.json.encode({} if arguments is None else arguments).decode()
