"""Waiting with a limit, without a timer where there is nothing to wait for."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, doing: Awaitable[T]) -> T:
    """What is awaited. Raises TimeoutError after so long."""
    steps = doing.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        value: T = done.value
        return value
    async with asyncio.timeout(seconds):
        return await rest(steps, waits_for)


def begun(doing: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Takes the first step of a coroutine at once; the rest of it is to be awaited."""
    try:
        waits_for = doing.send(None)
    except StopIteration as done:
        return _known(done.value)
    return rest(doing, waits_for)


async def _known(value: T) -> T:
    return value


@types.coroutine
def rest(begun: Coroutine[Any, Any, T] | Generator[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Goes on with a coroutine whose first step has been taken and waits for something."""
    while True:
        try:
            try:
                value = yield waits_for
            except BaseException as error:
                waits_for = begun.throw(error)
            else:
                waits_for = begun.send(value)
        except StopIteration as done:
            result: T = done.value
            return result
