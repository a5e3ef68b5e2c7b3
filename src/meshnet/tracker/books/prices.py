"""What a call costs and who earns it (pure integer arithmetic), and the price list that says how much.

A charge is rounded half up once. The mesh's share of it is rounded half up once; the nodes get exactly the
rest, by largest remainder (the Hamilton method), so that nothing is lost or made by rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sqlalchemy import Connection, select

from meshnet.tracker.books import schema
from meshnet.tracker.books.records import MICRO, BooksError, Clock, Price, Usage, Work
from meshnet.tracker.books.storage import Storage, upsert
from meshnet.tracker.books.watch import Watch, bump

ANY_MODEL: Final = "*"
BASIS: Final = 10_000
MAX_PRICE: Final = 10**11
MAX_TOKENS: Final = 4 * 10**7
"""Bounds on a price (100,000 units per million tokens) and on a call's tokens: their product fits 64 bits."""

Part = Literal["prefill", "decode", "mesh"]


@dataclass(frozen=True, slots=True)
class Share:
    """`amount` micro-units of a charge, earned by `node_id` for its prefill or decode part.

    The mesh has no node.
    """

    node_id: str | None
    part: Part
    amount: int


def half_up(numerator: int, denominator: int) -> int:
    """numerator / denominator, rounded half up. Both must not be negative."""
    return (2 * numerator + denominator) // (2 * denominator)


def charge(price: Price, prompt_tokens: int, output_tokens: int) -> int:
    """The price in micro-units of that many tokens, rounded half up once."""
    return half_up(price.input * prompt_tokens + price.output * output_tokens, MICRO)


def shares(price: Price, usage: Usage, amount: int, mesh_share: int) -> list[Share]:
    """Splits a charge of `amount`: `mesh_share` basis points to the mesh, the rest to the nodes.

    The input side of the charge goes by layers x prefill tokens, the output side by layers x decode tokens. A
    side without work joins the other (a prompt found whole in a cache); without any work all goes to the
    mesh. Ties go to the node whose id comes first, prefill before decode. The amounts sum to `amount`
    exactly.
    """
    to_mesh = half_up(amount * mesh_share, BASIS)
    prefill = _by_node(usage.work, lambda item: item.layers * item.prefill_tokens)
    decode = _by_node(usage.work, lambda item: item.layers * item.decode_tokens)
    input_cost = price.input * usage.prompt_tokens
    output_cost = price.output * usage.output_tokens
    if not prefill:
        input_cost, output_cost = 0, input_cost + output_cost
    elif not decode:
        input_cost, output_cost = input_cost + output_cost, 0
    prefill_total, decode_total = sum(prefill.values()) or 1, sum(decode.values()) or 1
    weights: dict[tuple[str, Part], int] = {}
    for node_id, units in prefill.items():
        weights[node_id, "prefill"] = input_cost * units * decode_total
    for node_id, units in decode.items():
        weights[node_id, "decode"] = output_cost * units * prefill_total
    total = sum(weights.values())
    if total == 0:
        return [Share(None, "mesh", amount)]
    rest = amount - to_mesh
    floors = {slot: rest * weight // total for slot, weight in weights.items()}
    left = rest - sum(floors.values())
    # "prefill" must come before "decode" on a tie, hence the reversed second part of the key.
    by_remainder = sorted(
        weights, key=lambda slot: (-(rest * weights[slot] % total), slot[0], slot[1] != "prefill")
    )
    for slot in by_remainder[:left]:
        floors[slot] += 1
    result = [Share(node, part, got) for (node, part), got in sorted(floors.items()) if got]
    if to_mesh:
        result.append(Share(None, "mesh", to_mesh))
    return result or [Share(None, "mesh", 0)]


def _by_node(work: Iterable[Work], units: Callable[[Work], int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for item in work:
        if count := units(item):
            sums[item.node_id] = sums.get(item.node_id, 0) + count
    return sums


class PriceList:
    """All prices, by model and time. Immutable once made; a change makes a new one."""

    def __init__(self, prices: Iterable[Price]) -> None:
        lists: dict[str, list[Price]] = {}
        for price in sorted(prices, key=lambda price: price.valid_from):
            lists.setdefault(price.model.lower(), []).append(price)
        self._lists: Final[Mapping[str, Sequence[Price]]] = lists

    def at(self, model: str, now: int) -> Price:
        """The price of `model` at `now`: its own, else that of `*`, else free."""
        for name in (model.lower(), ANY_MODEL):
            prices = self._lists.get(name, ())
            index = bisect_right(prices, now, key=lambda price: price.valid_from)
            if index:
                return prices[index - 1]
        return Price(model.lower(), 0, 0, 0)

    def all(self) -> list[Price]:
        """Every price ever set, by model, oldest first."""
        return [price for model in sorted(self._lists) for price in self._lists[model]]


class Prices:
    """The price list as stored, cached in memory and reloaded when any tracker changes it."""

    def __init__(self, storage: Storage, watch: Watch, clock: Clock) -> None:
        self._storage = storage
        self._watch = watch
        self._clock = clock
        self._list: PriceList | None = None
        self._generation = 0
        watch.on_change("prices", self._drop)

    def _drop(self) -> None:
        self._list = None
        self._generation += 1

    async def current(self) -> PriceList:
        """The price list, at most STALE_MS behind what another tracker has set."""
        if self._list is None:
            generation = self._generation
            rows = await self._storage.read(
                lambda connection: connection.execute(select(schema.prices)).all()
            )
            loaded = PriceList(Price(row.model, row.input, row.output, row.valid_from) for row in rows)
            if generation != self._generation:
                return loaded
            self._list = loaded
        return self._list

    async def set(self, model: str, input: int, output: int, valid_from: int | None = None) -> Price:
        """Sets the price of `model` (`*`: of those without their own) from `valid_from` (default: now) on.

        Calls accepted before keep the price of their acceptance. Raises BooksError for a price out of range
        or a time that has passed.
        """
        now = self._clock()
        for field, value in (("input", input), ("output", output)):
            if not 0 <= value <= MAX_PRICE:
                raise BooksError(
                    f"{field} is {value}; a price is 0 to {MAX_PRICE} micro-units per million tokens",
                    code="bad_price",
                    param=field,
                )
        if valid_from is not None and valid_from < now:
            raise BooksError(
                f"valid_from is {valid_from}, which has passed (now: {now}); leave it out for now",
                code="bad_price",
                param="valid_from",
            )
        price = Price(model.lower(), input, output, now if valid_from is None else valid_from)

        def write(connection: Connection) -> None:
            upsert(
                connection,
                schema.prices,
                [
                    {
                        "model": price.model,
                        "valid_from": price.valid_from,
                        "input": price.input,
                        "output": price.output,
                    }
                ],
                replace=("input", "output"),
            )
            bump(connection, "prices")

        await self._storage.write(write)
        self._watch.changed("prices")
        return price
