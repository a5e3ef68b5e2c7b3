"""What the scripted tracker answers in a chat: the last word of a message picks the script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

SENTENCE = (
    "The mesh keeps one sequence on every node that takes part, so a token only travels as a row of numbers "
    "from the last layer here to the first layer there , and the text comes back to whoever asked ."
)
WORDS = SENTENCE.split()
CODE = (
    "    {word} = ",
    "{word}(",
    '"{word}", ',
    "{number}, ",
    "key={word})",
    "  # {word}",
    " {word}",
    " {word}\n",
)
NEWLINE, PARAGRAPH = "\n", "\n\n"

ANSWER = """A route is a list of **stages**. Each stage runs a contiguous run of layers on one node:

1. the head tokenises and embeds,
2. every node in between passes hidden states on,
3. the tail samples the next token.

```python
def hops(route: list[Stage]) -> int:
    # one border fewer than there are stages
    return max(len(route) - 1, 0)
```

| node | layers | per step |
|---|---:|---:|
| attic | 0–14 | 3.1 ms |
| cellar | 15–29 | 4.4 ms |

The cost of a split is the trip: \\(t = t_{compute} + (S - 1) \\cdot t_{link}\\).
"""

THOUGHTS = "<think>\nThe user asks about routes.\n\nI should keep it short.\n</think>\n\n"


@dataclass(frozen=True)
class Script:
    """How one answer comes. `burst` pieces go out per write, one write per `interval_s`.

    tokens      so many words; 0: `text`, four characters at a time
    queue       places in the queue that it waits through first
    prefill     whether a long prefill is shown
    error, cut  how it ends when it does not end well; `done`: whether [DONE] comes
    status      refused with this HTTP status instead
    shape       what the words make: paragraphs, one paragraph, one block of code, one list, one table
    """

    text: str = ANSWER
    tokens: int = 0
    interval_s: float = 0.02
    burst: int = 1
    queue: int = 0
    prefill: bool = False
    error: bool = False
    cut: bool = False
    done: bool = True
    status: int | None = None
    shape: Literal["paragraphs", "paragraph", "code", "list", "table"] = "paragraphs"

    async def pieces(self) -> AsyncIterator[str]:
        if self.tokens == 0:
            source = (self.text[at : at + 4] for at in range(0, len(self.text), 4))
        else:
            source = (self._word(number) for number in range(self.tokens))
        for number, piece in enumerate(source):
            if number % self.burst == 0:
                await asyncio.sleep(self.interval_s)
            yield piece

    def _word(self, number: int) -> str:
        word = WORDS[number % len(WORDS)]
        last = number == self.tokens - 1
        if self.shape == "code":
            piece = CODE[number % len(CODE)].format(word=word.strip(",."), number=number)
            return f"{'```python' + NEWLINE if number == 0 else ''}{piece}{NEWLINE + '```' if last else ''}"
        if self.shape == "list":
            return f"{'- ' if number % 16 == 0 else ''}{word}{NEWLINE if number % 16 == 15 else ' '}"
        if self.shape == "table":
            head = "| a | b | c | d |\n|---|---:|---|---|\n" if number == 0 else ""
            border, end = "| " if number % 2 == 0 else "", f" |{NEWLINE}" if number % 8 == 7 else " "
            return f"{head}{border}{word}{end}"
        return f"{word} {PARAGRAPH if self.shape == 'paragraphs' and number % 97 == 96 else ''}"


HOSTILE = (
    'Before <script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> '
    '[link](javascript:window.hacked=3) <a href="javascript:window.hacked=4">a</a>\n\n'
    '<svg onload="window.hacked = 5"></svg>\n\n<iframe src="javascript:parent.hacked=6"></iframe>\n\n'
    '![pic](https://example.com/a.png" onload="window.hacked=7)\n\nAfter.'
)

SCRIPTS: dict[str, Script] = {
    "long": Script(tokens=10_000, interval_s=0.004, burst=4),
    "longline": Script(tokens=10_000, interval_s=0.004, burst=4, shape="paragraph"),
    "longcode": Script(tokens=10_000, interval_s=0.004, burst=4, shape="code"),
    "longlist": Script(tokens=10_000, interval_s=0.004, burst=4, shape="list"),
    "longtable": Script(tokens=10_000, interval_s=0.004, burst=4, shape="table"),
    "slow": Script(tokens=400, interval_s=0.05),
    "think": Script(THOUGHTS + ANSWER),
    "queued": Script(queue=3, prefill=True),
    "broken": Script(tokens=40, error=True),
    "early": Script("", tokens=0, error=True),
    "cut": Script(tokens=40, cut=True),
    "undone": Script("Whole, though the end mark is missing.", done=False),
    "refused": Script(status=503),
    "hostile": Script(HOSTILE),
}
