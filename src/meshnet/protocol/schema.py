"""JSON schemas: whether one can be held by a grammar."""

from __future__ import annotations

from typing import Any

import jsonschema

from meshnet.protocol.errors import ApiError


def check_schema(schema: Any, *, param: str) -> None:
    """Raises ApiError (400, `param`) unless the schema is one."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        path = "".join(f"/{step}" for step in error.path)
        raise ApiError(
            400, f"Invalid '{param}': {error.message} (at '#{path}').", param=param, code="invalid_schema"
        ) from None
