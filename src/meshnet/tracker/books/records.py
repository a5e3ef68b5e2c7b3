"""The values of the books: what goes in, what comes out. Amounts are int micro-units, times unix ms UTC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Clock = Callable[[], int]
"""Gives the time as integer unix milliseconds, UTC."""

Scope = Literal["use", "admin"]
Outcome = Literal["complete", "cancelled", "failed"]
Status = Literal["open", "held", "settled", "released", "refunded"]

MICRO = 1_000_000
"""Micro-units per unit; also the tokens that a price is for."""


class BooksError(Exception):
    """A demand that the books refuse.

    `code` is stable, `status` the HTTP status, `param` the field at fault.
    """

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param


class BooksUnavailable(BooksError):
    """The database cannot be reached or the writer's queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, code="books_unavailable", status=503)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Account:
    """A customer. `balance` is what is free to spend, `held` what open calls have reserved (micro-units)."""

    id: int
    name: str
    unlimited: bool
    balance: int
    held: int
    created_at: int


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """An API key, without its secret. None means no limit; an admin key may do all that a use key may."""

    id: int
    name: str
    account_id: int
    account: str
    scope: Scope
    created_at: int
    monthly_budget: int | None = None
    total_budget: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    last_used_at: int | None = None

    def may_use(self, model: str) -> bool:
        """True when the key's list of models (ids match case-insensitively) allows `model`."""
        return self.models is None or model.lower() in self.models


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token that lets nodes into this mesh. `uses` counts distinct nodes, not connections."""

    id: int
    name: str
    created_at: int
    expires_at: int | None
    max_uses: int | None
    uses: int
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens of a model cost, in micro-units, from `valid_from` on.

    Model `*` is the default.
    """

    model: str
    input: int
    output: int
    valid_from: int

    @property
    def free(self) -> bool:
        return self.input == 0 and self.output == 0


@dataclass(frozen=True, slots=True)
class Work:
    """What one node did in a call: `layers` run over `prefill_tokens` and over `decode_tokens` tokens."""

    node_id: str
    layers: int
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The measured usage of a call. A node that took part twice (failover) may stand in `work` twice."""

    prompt_tokens: int
    output_tokens: int
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """An accepted call.

    `amount` is what was set aside; a free call sets nothing aside and waits for no disk.
    """

    call_id: str
    account_id: int
    key_id: int
    model: str
    amount: int
    price: Price
    accepted_at: int
    repeated: bool = False


RefusalCode = Literal[
    "key_expired",
    "key_revoked",
    "model_not_allowed",
    "rate_limit_exceeded",
    "insufficient_quota",
    "budget_exceeded",
    "duplicate_call",
    "books_busy",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is not accepted, ready for OpenAI's error shape. `retry_after` is in whole seconds."""

    code: RefusalCode
    message: str
    status: int
    type: str
    retry_after: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a call stands after settle, release, hold, confirm or refund.

    `charge` is what the account has paid (0 once refunded), `earned` each node's part of it and `mesh` the
    mesh's share. `repeated` says that the call stood so already and nothing was written.
    """

    call_id: str
    status: Status
    charge: int
    mesh: int = 0
    earned: dict[str, int] = field(default_factory=dict)
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger: `amount` moves from book `source` to book `target`, so it balances by itself.

    Books: `account:ID` (free to spend), `held:ID` (reserved), `node:NAME`, `mesh`, and `outside`, where
    deposits come from. `part` says what an earning is for: prefill, decode or mesh.
    """

    id: int
    at: int
    call_id: str | None
    kind: str
    line: int
    part: str
    source: str
    target: str
    amount: int
    why: str | None
    reference: str | None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `ledger check` found; `ok` exactly when there are no problems."""

    calls: int
    entries: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems
