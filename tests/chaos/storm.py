"""What breaks: nodes killed, stopped, cut off and slowed down at random, and mended again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from support.quad import Quad

ACTS = ("kill", "stop", "cut", "cut the port", "swallow", "delay", "trickle")
RUTHLESS = 0.1
"""How often the last holder of some layers is hit as well."""
LAYERS = 30
PAUSE_S = (0.5, 3.0)
LASTS_S = (0.5, 6.0)


@dataclass
class Storm:
    """The same seed gives the same plan; what it hits depends on the machine.

    `tick` belongs to the main thread: a node ends with the thread that started it.
    """

    quad: Quad
    seed: int
    say: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _returning: set[str] = field(default_factory=set)
    _next_at: float = 0.0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def tick(self) -> None:
        """Breaks and mends what is due."""
        now = time.monotonic()
        self._returning = {name for name in self._returning if not self._back(name)}
        for name in [name for name, at in self._until.items() if now >= at]:
            del self._until[name]
            self.say(f"mend {name}")
            self.quad.mend_node(name)
            self._returning.add(name)
        if now < self._next_at:
            return
        chance = self._chance
        self._next_at = now + chance.uniform(*PAUSE_S)
        name, act = chance.choice(sorted(self.quad.layers)), chance.choice(ACTS)
        lasts = chance.uniform(*LASTS_S)
        ruthless = chance.random() < RUTHLESS
        if name in self._until or not (ruthless or self._spare(name)):
            return
        self.say(f"{act} {name} for {lasts:.1f} s")
        self.counts[act] = self.counts.get(act, 0) + 1
        self._until[name] = now + lasts
        self._break(name, act)

    def _spare(self, name: str) -> bool:
        """Whether every layer has another holder that is well."""
        out = {name, *self._until, *self._returning}
        held: set[int] = set()
        for other in self.quad.layers.keys() - out:
            first, last = map(int, self.quad.layers[other].split("-"))
            held.update(range(first, last + 1))
        return held >= set(range(LAYERS))

    def _back(self, name: str) -> bool:
        """Whether a mended node is routed over again."""
        listed = self.quad.mesh.get("/api/nodes")["nodes"]
        return any(node["name"] == name and node["ready"] for node in listed)

    def _break(self, name: str, act: str) -> None:
        if act == "delay":
            self.quad.gates.set(name, delay_s=0.2)
            self.quad.gates.set(f"{name}/http", delay_s=0.2)
        elif act == "trickle":
            self.quad.gates.set(name, trickle_s=0.2)
        else:
            self.quad.break_(name, act)
