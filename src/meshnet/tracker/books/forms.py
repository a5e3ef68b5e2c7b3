"""What the management API takes, checked field by field. Amounts in micro-units, times in unix ms."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from meshnet.tracker.books.accounts import MAX_AMOUNT
from meshnet.tracker.books.guard import BOUNDS
from meshnet.tracker.books.keys import MAX_LIMIT
from meshnet.tracker.books.prices import MAX_PRICE
from meshnet.tracker.books.records import Scope
from meshnet.tracker.books.reports import MAX_DAYS, PAGE

MAX_ID: Final = 2**63 - 1

# PostgreSQL's text cannot hold NUL.
Name = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f/]*[^\x00-\x20/][^\x00-\x1f/]*$")
]
Text = Annotated[str, Field(max_length=1_000, pattern=r"^[^\x00]*$")]
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Time = Annotated[int, Field(ge=0, le=MAX_ID)]
Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
Models = Annotated[list[Name], Field(max_length=1_000)]


class Form(BaseModel):
    """Unknown fields are refused, and no string counts as a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Query(BaseModel):
    """The same for query strings, where every value is a string at first."""

    model_config = ConfigDict(extra="forbid")


def _within(name: str) -> Any:
    low, high = BOUNDS[name]
    return Field(ge=low, le=high)


class GuardChange(Form):
    """The guard's thresholds; null stands for the default."""

    min_tokens: Annotated[int, _within("min_tokens")] | None = None
    check_ms: Annotated[int, _within("check_ms")] | None = None
    audit_ppm: Annotated[int, _within("audit_ppm")] | None = None
    max_gap: Annotated[float, _within("max_gap")] | None = None
    max_attempts: Annotated[int, _within("max_attempts")] | None = None


class RulesChange(Form):
    """What is left out stays as it is."""

    mesh_share: Annotated[int, Field(ge=0, le=10_000)] | None = None
    guard: GuardChange | None = None


class NewAccount(Form):
    name: Name
    unlimited: bool = False


class AccountChange(Form):
    unlimited: bool


class Deposit(Form):
    amount: Annotated[int, Field(ge=-MAX_AMOUNT, le=MAX_AMOUNT)]
    why: Text | None = None
    reference: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")] | None = None


class NewKey(Form):
    account: Name
    name: Name
    scope: Scope = "use"
    models: Models | None = None
    expires_at: Time | None = None
    monthly_budget: Limit | None = None
    total_budget: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class KeyChange(Form):
    """Only the fields that are given change; null lifts a limit."""

    name: Name = ""
    models: Models | None = None
    expires_at: Time | None = None
    monthly_budget: Limit | None = None
    total_budget: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class NewPrice(Form):
    model: Name | Annotated[str, Field(pattern=r"^\*$")]
    input: Annotated[int, Field(ge=0, le=MAX_PRICE)]
    output: Annotated[int, Field(ge=0, le=MAX_PRICE)]
    valid_from: Time | None = None


class RefundOrder(Form):
    call_id: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
    why: Annotated[str, Field(min_length=1, max_length=1_000, pattern=r"^[^\x00]*$")]


class NewJoinToken(Form):
    """`valid_ms` null: no expiry; `max_uses` null: any number of nodes."""

    name: Name = "invitation"
    valid_ms: Annotated[int, Field(ge=1, le=10 * 366 * 86_400_000)] | None = 86_400_000
    max_uses: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class KeysQuery(Query):
    account: Name | None = None


class LedgerQuery(Query):
    after: Id = 0
    limit: Annotated[int, Field(ge=1, le=PAGE)] = 100
    account: Name | None = None
    call: Text | None = None


class SpendingQuery(Query):
    """The last `days` days, today included."""

    days: Annotated[int, Field(ge=1, le=MAX_DAYS)] = 30
    account: Name | None = None
    key: Id | None = None


class SuspectsQuery(Query):
    open: bool = False
    limit: Annotated[int, Field(ge=1, le=1_000)] = 100


class NoQuery(Query):
    """No parameters."""
