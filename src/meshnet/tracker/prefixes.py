"""Where conversations live: which nodes hold an earlier turn's state, so that planning can go back to them.

Kept are hashes with a key of this process, never text. It is a guess: nodes drop idle sessions when they need
room.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from meshnet.protocol.openai import ChatRequest, CompletionRequest

MAX_KEPT = 10_000
KEEP_S = 900.0
MAX_MESSAGES = 512
"""Longer conversations are looked up by their last so many messages only."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Kept:
    """The nodes of a route in order, and how many tokens its sessions hold (prompt and answer)."""

    nodes: tuple[str, ...]
    tokens: int
    at: float


class Prefixes:
    """Bounded; the longest unused goes first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secret = os.urandom(16)
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def hashes(self, scope: str, model: str, request: ChatRequest | CompletionRequest) -> list[bytes]:
        """One hash per prefix of the conversation, the shortest first; `scope` keeps accounts apart."""
        if not isinstance(request, ChatRequest):
            return []
        running = hashlib.blake2b(f"{scope}\0{model}\0".encode(), key=self._secret, digest_size=16)
        running.update(_encode(request.tools))
        found = []
        for message in request.messages:
            running.update(_encode(message))
            found.append(running.digest())
        return found[-MAX_MESSAGES:]

    def find(self, hashes: list[bytes]) -> Mapping[str, int]:
        """Tokens that nodes hold of the longest earlier turn, by node id."""
        for digest in reversed(hashes):
            kept = self._kept.get(digest)
            if kept is not None:
                if self._clock() - kept.at > KEEP_S:
                    del self._kept[digest]
                    continue
                return dict.fromkeys(kept.nodes, kept.tokens)
        return {}

    def remember(self, hashes: list[bytes], nodes: tuple[str, ...], tokens: int) -> None:
        """A turn has ended on these nodes."""
        if not hashes:
            return
        self._kept[hashes[-1]] = Kept(nodes, tokens, self._clock())
        self._kept.move_to_end(hashes[-1])
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def forget_node(self, node_id: str) -> None:
        """A node is gone, and with it what it held."""
        gone = [digest for digest, kept in self._kept.items() if node_id in kept.nodes]
        for digest in gone:
            del self._kept[digest]
