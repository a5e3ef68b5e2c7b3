"""OpenAI's error shape, as an exception and as bytes."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A request is refused or failed. `param` is the parameter's path, `retry_after` in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str = "invalid_value",
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """`{"error": {"message", "type", "code", "param"}}` as JSON."""
        return error_body(self.message, self.type, self.code, self.param)


def error_body(message: str, type: str, code: str, param: str | None = None) -> bytes:
    """The body of an error answer, and the data of an error event in a stream."""
    return _encode({"error": {"message": message, "type": type, "code": code, "param": param}})


class SchemaError(ValueError):
    """A JSON schema that no grammar holds. `path`: JSON pointer; `keyword`: empty where none is at fault."""

    def __init__(self, message: str, path: str, keyword: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.keyword = keyword
