"""The request bodies as JSON schemas, for the published OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from meshnet.protocol.bodies import ChatBody, CompletionBody
from meshnet.protocol.openai import CHAT_NEUTRAL, COMPLETION_NEUTRAL

TEMPLATE = "#/components/schemas/{name}"
_REFUSED = frozenset(("ImagePart", "AudioPart", "FilePart", "FunctionMessage"))
"""Known only so that they can be refused by name."""


def body_schemas() -> dict[str, Any]:
    """`components.schemas` of an OpenAPI document: `ChatBody`, `CompletionBody` and what they refer to."""
    _, components = msgspec.json.schema_components([ChatBody, CompletionBody], ref_template=TEMPLATE)
    for name, neutral in (("ChatBody", CHAT_NEUTRAL), ("CompletionBody", COMPLETION_NEUTRAL)):
        for parameter, values in neutral.items():
            components[name]["properties"][parameter] = {"enum": [None, *values]}
    shown: dict[str, Any] = {
        name: _without_refused(schema) for name, schema in components.items() if name not in _REFUSED
    }
    return shown


def _without_refused(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_refused(item) for item in value if not _is_refused(item)]
    if isinstance(value, dict):
        return {key: _without_refused(item) for key, item in value.items() if not _is_refused(item)}
    return value


def _is_refused(value: Any) -> bool:
    """A reference to one of them, as a schema or in a discriminator's mapping."""
    pointer = value.get("$ref") if isinstance(value, dict) else value
    return isinstance(pointer, str) and pointer.rpartition("/")[2] in _REFUSED
