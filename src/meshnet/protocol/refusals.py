"""What a refused parameter is told: decoder errors turned into OpenAI's error shape with a path."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meshnet.protocol.errors import ApiError

_PATH = re.compile(r" - at `(?:key(?: in `\$|` in `\$)|\$)(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_VALUE = re.compile(r"Invalid value (.*)", re.DOTALL)
_TYPE = re.compile(r"\b(int|float|str|bool)\b")
_TYPE_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_SHOWN = 80


def refused(param: str, why: str, *, code: str = "invalid_value") -> ApiError:
    """400 for one parameter; `why` is a sentence without its full stop."""
    return ApiError(400, f"Invalid '{param}': {why}.", code=code, param=param)


def missing(param: str) -> ApiError:
    return ApiError(
        400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param
    )


def translate(message: str, body: bytes) -> ApiError:
    """A msgspec validation message about `body` (valid JSON) as the 400 that names the parameter."""
    found = _PATH.search(message)
    what = message[: found.start()] if found else message
    path = found.group(1) if found else ""
    param = path.removeprefix(".")
    if match := _UNKNOWN.fullmatch(what):
        name = f"{param}.{match.group(1)}" if param else match.group(1)
        return ApiError(
            400,
            f"Unknown parameter: '{name}'. meshnet ignores no parameter; leave it out.",
            code="unknown_parameter",
            param=name,
        )
    if match := _MISSING.fullmatch(what):
        return missing(f"{param}.{match.group(1)}" if param else match.group(1))
    if not param:
        return ApiError(400, f"The body must be a JSON object: {what}.", code="invalid_type")
    # A dictionary's keys are not in the decoder's path.
    param = param.removesuffix("[...]")
    if match := _VALUE.fullmatch(what):
        return refused(param, f"{match.group(1)} is not one of the values that it takes")
    code = "invalid_type" if ", got `" in what else "invalid_value"
    return refused(param, _plain(what) + _shown(path, body), code=code)


def _plain(what: str) -> str:
    """The decoder's expectation with JSON's names for types."""
    what = what[0].lower() + what[1:]
    return _TYPE.sub(lambda match: _TYPE_NAMES[match.group(1)], what).replace(" | ", " or ").replace("`", "")


def _shown(path: str, body: bytes) -> str:
    """` (value was ...)`, or nothing where the path cannot be followed to a short value."""
    try:
        value: Any = msgspec.json.decode(body)
        for key, index in _STEP.findall(path):
            value = value[int(index)] if index else value[key]
        text = msgspec.json.encode(value).decode()
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    return "" if "[...]" in path or len(text) > _SHOWN else f" (it was {text})"
