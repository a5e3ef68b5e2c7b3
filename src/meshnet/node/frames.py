"""What waits to be written to one stream, bundled into frames.

All that one engine call produced for one peer is queued within one turn of the event loop and leaves as one
frame, so that it arrives together and stays one batch. Bounded: a peer that does not read is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from meshnet.protocol import dataplane_pb2 as pb

MAX_FRAME_BYTES = 8 << 20
"""A frame is closed when its steps hold more; a single step may be larger."""
MAX_MESSAGE_BYTES = 64 << 20
"""What a receiver takes at most in one message."""
MAX_WAITING = 8192
MAX_WAITING_BYTES = 256 << 20

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    # A channel of its own connection: gRPC would share that of an earlier one, and with it the pause that it
    # makes after a failure, in which a peer that is back cannot be reached.
    ("grpc.use_local_subchannel_pool", 1),
]

_FIELD = {
    pb.Open: "opens",
    pb.Step: "steps",
    pb.Close: "closes",
    pb.Opened: "opened",
    pb.Credit: "credits",
    pb.Lost: "lost",
    pb.Result: "results",
}
Message = pb.Open | pb.Step | pb.Close | pb.Opened | pb.Credit | pb.Lost | pb.Result | pb.Hello | pb.Progress
_ORDER_MATTERS = (pb.Open, pb.Step, pb.Close)


STREAM_ENDED = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)
"""What writing to a stream that has ended raises."""


class OutboxFull(Exception):
    """The peer does not read what is sent to it."""


@dataclass(slots=True)
class Traffic:
    """What all streams of a node have taken since it started."""

    sent_bytes: int = 0
    """Of hidden states."""


class Outbox:
    """Messages for one stream. `put` from the event loop; `pump` writes until it is cancelled, or `direct`
    names who takes them."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self._traffic = traffic or Traffic()
        self._waiting: deque[Message | bool] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._send: Callable[[bytes], object] | None = None
        self._held = self._due = False

    def put(self, message: Message) -> None:
        """Queues a message. Raises OutboxFull."""
        if isinstance(message, pb.Step):
            self._bytes += len(message.data)
        if len(self._waiting) >= MAX_WAITING or self._bytes > MAX_WAITING_BYTES:
            raise OutboxFull(f"{len(self._waiting)} messages ({self._bytes >> 20} MiB) wait to be read")
        self._waiting.append(message)
        self._stir()

    def poll(self) -> None:
        """Queues a question for progress."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(True)
            self._stir()

    def direct(self, send: Callable[[bytes], object]) -> None:
        """From now on frames go to `send`, without `pump`."""
        self._send = send
        self.flush()

    def hold(self, on: bool) -> None:
        """Whoever sends directly can take no more, or again."""
        self._held = on
        if not on:
            self.flush()

    def flush(self) -> None:
        """Sends directly what waits, where there is somebody who takes it; at the latest in the loop's next
        turn it would go by itself."""
        self._due = False
        while self._waiting and self._send is not None and not self._held:
            self._send(self._frame().SerializeToString())

    def _stir(self) -> None:
        if self._send is None:
            self._wake.set()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.flush)

    async def pump(self, write: Callable[[pb.Frame], Awaitable[object]]) -> None:
        """Writes frames as messages come, until the stream has ended (its reader says why) or it is
        cancelled."""
        with contextlib.suppress(*STREAM_ENDED):
            while True:
                await self._wake.wait()
                while self._waiting:
                    await write(self._frame())
                self._wake.clear()

    def _frame(self) -> pb.Frame:
        """As many waiting messages as one frame may hold, in an order that the receiver's keeps.

        Within a frame the receiver takes opens first, then steps, then closes; a frame ends where the
        queue's order is another.
        """
        frame = pb.Frame()
        size = 0
        rank = 0
        waiting = self._waiting
        while waiting:
            message = waiting[0]
            if isinstance(message, _ORDER_MATTERS):
                own = _ORDER_MATTERS.index(type(message))
                if own < rank:
                    break
                rank = own
            if isinstance(message, pb.Step):
                if size and size + len(message.data) > MAX_FRAME_BYTES:
                    break
                size += len(message.data)
                self._bytes -= len(message.data)
            waiting.popleft()
            if message is True:
                frame.poll = True
            elif isinstance(message, pb.Hello):
                frame.hello.CopyFrom(message)
            elif isinstance(message, pb.Progress):
                frame.progress.CopyFrom(message)
            else:
                getattr(frame, _FIELD[type(message)]).append(message)
        self._traffic.sent_bytes += size
        return frame
