"""What breaks: nodes killed, stopped, cut off and slowed down at random, and mended again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from support.quad import Quad

ACTS = ("kill", "stop", "cut", "swallow", "delay", "trickle")
MOST_OUT = 2
"""Nodes that are broken at the same time, of four."""
PAUSE_S = (0.5, 3.0)
LASTS_S = (0.5, 6.0)


@dataclass
class Storm:
    """Runs on its own thread. The same seed gives the same plan; what it hits depends on the machine."""

    quad: Quad
    seed: int
    say: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it and mends everything. Raises what went wrong in it."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(60.0)
        if self._failure is not None:
            raise self._failure
        self.quad.mend()

    def _run(self) -> None:
        try:
            self._blow()
        except BaseException as failure:
            self._failure = failure

    def _blow(self) -> None:
        chance = random.Random(self.seed)
        until: dict[str, float] = {}
        next_at = time.monotonic()
        while not self._stop.wait(0.05):
            now = time.monotonic()
            for name in [name for name, at in until.items() if now >= at]:
                del until[name]
                self._repair(name)
            if now < next_at:
                continue
            next_at = now + chance.uniform(*PAUSE_S)
            name, act = chance.choice(sorted(self.quad.layers)), chance.choice(ACTS)
            lasts = chance.uniform(*LASTS_S)
            if name in until or len(until) >= MOST_OUT:
                continue
            self.say(f"{act} {name} for {lasts:.1f} s")
            self.counts[act] = self.counts.get(act, 0) + 1
            until[name] = now + lasts
            self._break(name, act)

    def _break(self, name: str, act: str) -> None:
        if act == "delay":
            self.quad.gates.set(name, delay_s=0.2)
            self.quad.gates.set(f"{name}/http", delay_s=0.2)
        elif act == "trickle":
            self.quad.gates.set(name, trickle_s=0.2)
        else:
            self.quad.break_(name, act)

    def _repair(self, name: str) -> None:
        self.say(f"mend {name}")
        self.quad.mend_node(name)
