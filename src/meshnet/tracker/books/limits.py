"""Rate limits of keys: requests and tokens per minute, as pure state machines on integers.

Each limit is a bucket that holds one minute's worth and fills continuously. A request passes while anything
is left in both buckets and then takes what it needs, so the token bucket may go below zero: a request larger
than the limit is possible, but the next one waits until its debt is paid. Over any longer time the limit
holds exactly.

Limits are counted per tracker process: with several trackers, a key has its limit at each.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final, Literal

MINUTE_MS: Final = 60_000
TRACKED_KEYS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` is in 1/60,000 of a unit, so `limit` units per minute are `limit` levels per millisecond."""

    limit: int
    level: int
    at: int

    @classmethod
    def full(cls, limit: int, now: int) -> Bucket:
        return cls(limit, limit * MINUTE_MS, now)

    def filled(self, now: int, limit: int) -> Bucket:
        """The bucket at `now`, under `limit`. A clock that went back fills nothing."""
        passed = max(0, now - self.at)
        return Bucket(limit, min(limit * MINUTE_MS, self.level + limit * passed), max(now, self.at))

    def take(self, units: int) -> Bucket:
        """Takes (or, negative, gives back) that many units."""
        return replace(self, level=min(self.limit * MINUTE_MS, self.level - units * MINUTE_MS))

    def wait_s(self, units: int) -> int:
        """Whole seconds until `units` would be there; at least 1."""
        missing = units * MINUTE_MS - self.level
        if self.limit == 0:
            return 60
        return max(1, -(-missing // (self.limit * 1000)))


@dataclass(frozen=True, slots=True)
class Passed:
    """The request may go on; the buckets after it."""

    requests: Bucket | None
    tokens: Bucket | None


@dataclass(frozen=True, slots=True)
class Limited:
    """The request must wait for `retry_after` seconds because of `limit`."""

    limit: Literal["requests_per_minute", "tokens_per_minute"]
    value: int
    retry_after: int


def admit(
    requests: Bucket | None,
    tokens: Bucket | None,
    *,
    requests_limit: int | None,
    tokens_limit: int | None,
    need: int,
    now: int,
) -> Passed | Limited:
    """Decides on one request that may use up to `need` tokens. None as a bucket is a full one."""
    after_requests = after_tokens = None
    if requests_limit is not None:
        bucket = (requests or Bucket.full(requests_limit, now)).filled(now, requests_limit)
        if bucket.level < MINUTE_MS:
            return Limited("requests_per_minute", requests_limit, bucket.wait_s(1))
        after_requests = bucket.take(1)
    if tokens_limit is not None:
        bucket = (tokens or Bucket.full(tokens_limit, now)).filled(now, tokens_limit)
        if bucket.level <= 0:
            return Limited("tokens_per_minute", tokens_limit, bucket.wait_s(1))
        after_tokens = bucket.take(need)
    return Passed(after_requests, after_tokens)


class Limits:
    """The buckets of the keys that have limits.

    The least recently used are forgotten (a full bucket again).
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[int, Passed] = OrderedDict()

    def admit(
        self,
        key_id: int,
        requests_limit: int | None,
        tokens_limit: int | None,
        need: int,
        now: int,
        *,
        counted: bool = False,
    ) -> Limited | None:
        """Counts a request of a key and its tokens (`counted`: these only), or says why it must wait."""
        if requests_limit is None and tokens_limit is None:
            return None
        before = self._buckets.get(key_id, Passed(None, None))
        decision = admit(
            before.requests,
            before.tokens,
            requests_limit=None if counted else requests_limit,
            tokens_limit=tokens_limit,
            need=need,
            now=now,
        )
        if isinstance(decision, Limited):
            return decision
        self._buckets[key_id] = replace(decision, requests=before.requests) if counted else decision
        self._buckets.move_to_end(key_id)
        if len(self._buckets) > TRACKED_KEYS:
            self._buckets.popitem(last=False)
        return None

    def give_back(self, key_id: int, tokens: int) -> None:
        """Returns tokens that a request had taken and did not use."""
        state = self._buckets.get(key_id)
        if state is not None and state.tokens is not None and tokens > 0:
            self._buckets[key_id] = Passed(state.requests, state.tokens.take(-tokens))
