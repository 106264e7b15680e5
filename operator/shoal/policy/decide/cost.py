"""What nodes cost: by the prices that their pools say, beside those of on-demand nodes of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from shoal.api.capacity_pool import CapacityPool
from shoal.api.planning_status import CostStatus

MOST_AN_HOUR = Decimal(10**9)
"""More, which the CRD lets somebody say of a node, would be an amount that no status takes."""
_MICRO = Decimal("0.000001")
_HOUR = Decimal(3600)


def cost_so_far(
    pools: Mapping[str, CapacityPool],
    node_prices: Mapping[str, Decimal | None],
    before: CostStatus | None,
    seconds: Mapping[str, Decimal],
    now: Mapping[str, Decimal],
) -> CostStatus | None:
    """The cost so far, with `seconds` of nodes more; `now`: how many there are. Both by pool, the job's part."""
    if (
        before is None
        and not any(pool.spec.price for pool in pools.values())
        and not any(node_prices.values())
    ):
        return None
    before = before or CostStatus()
    spent, saved = Decimal(before.accumulated), Decimal(before.saved_versus_on_demand)
    for name, some in seconds.items():
        if (price := node_prices[name]) is None:
            continue
        spent += price * some / _HOUR
        saved += max(Decimal(0), (_on_demand_price(pools, name) or price) - price) * some / _HOUR
    prices = ((node_prices[name] or Decimal(0)) * nodes for name, nodes in now.items())
    per_hour = sum(prices, Decimal(0))
    return CostStatus(
        per_hour=amount_text(per_hour),
        accumulated=amount_text(spent),
        saved_versus_on_demand=amount_text(saved),
    )


def price_of(pool: CapacityPool) -> Decimal | None:
    """Of one of its nodes for an hour; None: nobody said it."""
    price = pool.spec.price
    return None if price is None else min(Decimal(str(price.per_hour)), MOST_AN_HOUR)


def _on_demand_price(pools: Mapping[str, CapacityPool], name: str) -> Decimal | None:
    """The least price of an on-demand node with the same accelerators or, without any, as many cores."""
    same = _kind(pools[name]) if name in pools else None
    prices = [
        price
        for pool in pools.values()
        if pool.spec.capacity_type == "OnDemand"
        and same
        and _kind(pool) == same
        and (price := price_of(pool))
    ]
    return min(prices, default=None)


def _kind(pool: CapacityPool) -> object:
    """What nodes of a pool are compared by; nothing where it is not said."""
    return pool.spec.accelerator or pool.spec.core_count or None


def amount_text(amount: Decimal) -> str:
    """To a millionth, without zeros at the end."""
    text = f"{amount.quantize(_MICRO):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
