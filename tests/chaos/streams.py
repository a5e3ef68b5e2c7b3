"""What goes on meanwhile: a number of clients that ask, read, and now and then leave in the middle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
from support.quad import Heard, Quad, ask

MAX_TOKENS = 40
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
PROMPTS = (
    "Tell me about the sea.",
    "Write a short poem about winter.",
    "Explain how a clock works, step by step.",
    "What did the fox say to the crow? Tell the whole story.",
    "Count from one to thirty in words. " * 12,
)
"""Each comes with a system message of its own: what a node kept of one helps with none of the others. A
prompt of 64 rows or more gets other bits when a part of it was computed for a shorter one."""
ALLOWED = frozenset({"route_lost", "no_route", "queue_timeout", "queue_full", "busy"})
"""How a call may fail while nodes are out."""
LEAVES = 0.1


class Left(Exception):
    """The client went away on purpose."""


@dataclass(frozen=True)
class Asked:
    """One call: what it was, and what its client saw."""

    prompt: str
    sampled: bool
    stream: bool
    heard: Heard
    left: bool = False


@dataclass
class Streams:
    """`count` clients on threads of their own. `expected` are the undisturbed answers."""

    quad: Quad
    count: int
    seed: int
    expected: dict[tuple[str, bool], str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _failures: list[BaseException] = field(default_factory=list)

    def learn(self) -> None:
        """Asks everything once, undisturbed."""
        for prompt in PROMPTS:
            for sampled in (False, True):
                heard = ask(self.quad.mesh, prompt, **_parameters(prompt, sampled=sampled))
                assert heard.error is None, heard
                self.expected[prompt, sampled] = heard.text

    def start(self) -> None:
        for number in range(self.count):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Lets each client finish its call. Raises what went wrong with one."""
        self._stop.set()
        for thread in self._threads:
            thread.join(240.0)
            assert not thread.is_alive(), "a call has not ended"
        if self._failures:
            raise self._failures[0]

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        try:
            while not self._stop.is_set():
                asked = self._ask(chance)
                self.asked.append(asked)
                if asked.heard.error is not None:
                    time.sleep(0.2)
        except BaseException as failure:
            self._failures.append(failure)

    def _ask(self, chance: random.Random) -> Asked:
        prompt, sampled, stream = chance.choice(PROMPTS), chance.random() < 0.4, chance.random() < 0.7
        leaves = chance.randrange(1, MAX_TOKENS) if stream and chance.random() < LEAVES else 0
        begun = Heard()

        def on_piece(piece: int) -> None:
            if piece == leaves:
                raise Left

        try:
            heard = ask(
                self.quad.mesh,
                prompt,
                stream=stream,
                on_piece=on_piece if leaves else None,
                heard=begun,
                **_parameters(prompt, sampled=sampled),
            )
        except Left:
            return Asked(prompt, sampled, stream, begun, left=True)
        except httpx.HTTPError as error:
            raise AssertionError(f"the front door broke off: {error!r} after {begun}") from error
        return Asked(prompt, sampled, stream, heard)

    def problems(self) -> list[str]:
        """What no call may do, whatever broke meanwhile."""
        found: list[str] = []
        for asked in self.asked:
            heard, text = asked.heard, self.expected[asked.prompt, asked.sampled]
            said = f"call {heard.call_id} ({'sampled' if asked.sampled else 'greedy'})"
            if asked.left:
                if not text.startswith(heard.text):
                    found.append(f"{said} said {heard.text!r} before its client left, not {text!r}")
            elif heard.error is not None:
                if heard.error["code"] not in ALLOWED:
                    found.append(f"{said} failed: {heard.error}")
                if not text.startswith(heard.text):
                    found.append(f"{said} said {heard.text!r} before it failed, not {text!r}")
                if heard.status == 200 and heard.ended != 1:
                    found.append(f"{said} failed and ended {heard.ended} times")
            elif heard.text != text:
                found.append(f"{said} said {heard.text!r}, not {text!r}")
            elif heard.ended != 1:
                found.append(f"{said} ended {heard.ended} times")
        return found

    def ledger_problems(self, calls: Sequence[Asked]) -> list[str]:
        """Where the ledger and what clients saw disagree."""
        found: list[str] = []
        for asked in calls:
            heard = asked.heard
            if not heard.call_id:
                continue
            with self.quad.mesh.client(admin=True) as client:
                answer = client.get(f"/api/calls/{heard.call_id}/ledger")
            if answer.status_code != 200:
                found.append(f"the ledger does not know call {heard.call_id}: {answer.text}")
                continue
            entry = answer.json()
            charged = entry["charge"]
            if heard.error is not None and charged:
                found.append(f"call {heard.call_id} failed and was charged: {entry}")
            if heard.error is None and not asked.left and not charged:
                found.append(f"call {heard.call_id} was answered and not charged: {entry}")
        return found


def _parameters(prompt: str, *, sampled: bool) -> dict[str, Any]:
    return {"messages": _messages(prompt), "max_tokens": MAX_TOKENS, **(SAMPLED if sampled else {})}


def _messages(prompt: str) -> list[dict[str, str]]:
    number = PROMPTS.index(prompt)
    return [
        {"role": "system", "content": f"{number} is your number."},
        {"role": "user", "content": prompt},
    ]
