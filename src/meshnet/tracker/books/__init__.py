"""Accounts, keys, prices, the ledger, statistics and the billing guard of a mesh. Start at `Books`."""

from meshnet.tracker.books.facade import Books, Bootstrap
from meshnet.tracker.books.records import (
    Account,
    BooksError,
    BooksUnavailable,
    CheckReport,
    Entry,
    JoinToken,
    KeyInfo,
    Outcome,
    Price,
    Refusal,
    Reservation,
    Settlement,
    Usage,
    Work,
)

__all__ = [
    "Account",
    "Books",
    "BooksError",
    "BooksUnavailable",
    "Bootstrap",
    "CheckReport",
    "Entry",
    "JoinToken",
    "KeyInfo",
    "Outcome",
    "Price",
    "Refusal",
    "Reservation",
    "Settlement",
    "Usage",
    "Work",
]
