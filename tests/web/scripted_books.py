"""The books as the scripted tracker shows them: fixed tables, in the shapes of docs/books.md."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any, Final

_draw = random.Random(7)
_NOW = datetime.now(UTC)


def _ms(days_ago: float = 0.0) -> int:
    return int((_NOW - timedelta(days=days_ago)).timestamp() * 1000)


def _key(number: int, name: str, account: str, scope: str = "use", **more: Any) -> dict[str, Any]:
    key = {
        "id": number,
        "name": name,
        "account_id": 1,
        "account": account,
        "scope": scope,
        "created_at": _ms(40),
        "monthly_budget": None,
        "total_budget": None,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "models": None,
        "expires_at": None,
        "revoked_at": None,
        "last_used_at": _ms(0.1 * number),
    }
    return {**key, **more}


_KEYS: Final = [
    _key(1, "admin", "home", "admin"),
    _key(2, "phone", "home", monthly_budget=5_000_000),
    _key(3, "backup job", "office", requests_per_minute=60),
    _key(4, "old laptop", "home", revoked_at=_ms(12)),
]


def _spending() -> list[dict[str, Any]]:
    rows = []
    for day in range(29, -1, -1):
        for key in _KEYS[:3]:
            if _draw.random() < 0.25:
                continue
            output = _draw.randint(2_000, 90_000)
            rows.append(
                {
                    "day": (_NOW - timedelta(days=day)).strftime("%Y-%m-%d"),
                    "account": key["account"],
                    "key_id": key["id"],
                    "key": key["name"],
                    "calls": output // 300,
                    "prompt_tokens": output * 2,
                    "output_tokens": output,
                    "charge": output * 9,
                }
            )
    return rows


_SPENDING: Final = _spending()
_CALL: Final = "c000042"

BOOKS: Final[dict[str, Any]] = {
    "/api/me": {
        "key": _KEYS[1],
        "unlimited": False,
        "balance": 12_345_678,
        "held": 4_200,
        "spent_this_month": 1_204_113,
        "spent_in_all": 3_950_001,
        "spending": [row for row in _SPENDING if row["key_id"] == 2],
    },
    "/api/accounts": {
        "accounts": [
            {
                "id": 1,
                "name": "home",
                "unlimited": True,
                "balance": -3_950_001,
                "held": 4_200,
                "created_at": 0,
            },
            {
                "id": 2,
                "name": "office",
                "unlimited": False,
                "balance": 21_500_000,
                "held": 0,
                "created_at": 0,
            },
        ]
    },
    "/api/keys": {"keys": _KEYS},
    "/api/spending": {"spending": _SPENDING},
    "/api/earnings": {
        "nodes": [
            {
                "node_id": "id-attic",
                "calls": 812,
                "prefill_units": 910_210,
                "decode_units": 420_113,
                "earned": 2_911_020,
            },
            {
                "node_id": "id-cellar",
                "calls": 790,
                "prefill_units": 880_400,
                "decode_units": 401_900,
                "earned": 2_700_310,
            },
            {
                "node_id": "id-workshop",
                "calls": 61,
                "prefill_units": 70_021,
                "decode_units": 33_870,
                "earned": 240_877,
            },
        ]
    },
    "/api/suspects": {
        "suspects": [
            {
                "call_id": _CALL,
                "cause": "suspect",
                "model": "smollm2-135m-instruct",
                "route": ["id-attic", "id-cellar"],
                "reason": "ended by an end-of-sequence token after 2 tokens",
                "opened_at": _ms(0.02),
                "state": "confirmed",
                "attempts": 1,
                "closed_at": _ms(0.01),
                "checks": [
                    {
                        "call_id": _CALL,
                        "cause": "suspect",
                        "nodes": ["id-workshop"],
                        "passed": True,
                        "worst_gap": 0.31,
                        "detail": "every token is within 1.5 of the maximum",
                        "at": _ms(0.01),
                    }
                ],
            }
        ]
    },
    f"/api/calls/{_CALL}/ledger": {
        "id": _CALL,
        "account": "home",
        "key_id": 2,
        "key": "phone",
        "model": "smollm2-135m-instruct",
        "status": "settled",
        "outcome": "complete",
        "reason": None,
        "price_input": 1_000_000,
        "price_output": 9_000_000,
        "mesh_share": 0,
        "reserved": 9_224,
        "charge": 42,
        "prompt_tokens": 24,
        "output_tokens": 2,
        "accepted_at": _ms(0.02),
        "ended_at": _ms(0.02),
        "work": [
            {"node_id": "id-attic", "layers": 15, "prefill_tokens": 24, "decode_tokens": 2},
            {"node_id": "id-cellar", "layers": 15, "prefill_tokens": 24, "decode_tokens": 2},
        ],
        "entries": [
            {
                "id": 90 + line,
                "at": _ms(0.02),
                "call_id": _CALL,
                "kind": kind,
                "line": line,
                "part": part,
                "source": source,
                "target": target,
                "amount": amount,
                "why": None,
                "reference": None,
            }
            for line, (kind, part, source, target, amount) in enumerate(
                [
                    ("reserve", "", "account:1", "held:1", 9_224),
                    ("settle", "prefill", "held:1", "node:id-attic", 12),
                    ("settle", "prefill", "held:1", "node:id-cellar", 12),
                    ("settle", "decode", "held:1", "node:id-attic", 9),
                    ("settle", "decode", "held:1", "node:id-cellar", 9),
                    ("settle", "", "held:1", "account:1", 9_182),
                ]
            )
        ],
    },
}
