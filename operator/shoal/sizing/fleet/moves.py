"""How far jobs get on the way to their plans: nodes of full pools change hands, and no job goes below its floor.

Two jobs of which neither can spare a worker never swap full pools: each would wait for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Move", "reached"]


@dataclass(frozen=True)
class Move:
    """A job that has so many nodes by pool `now` and is to have others `then`, with `floor` workers on the way."""

    now: Mapping[str, int]
    then: Mapping[str, int]
    floor: int


def reached(moves: Sequence[Move], limits: Mapping[str, int]) -> list[Counter[str]]:
    """What each has in the end: it takes the nodes that are free, and gives up what it can spare."""
    held = [Counter(move.now) for move in moves]
    free = Counter(limits)
    for has in held:
        free.subtract(has)

    def change(has: Counter[str], pool: str, number: int) -> bool:
        has[pool] += number
        free[pool] -= number
        return number != 0

    changed = True
    while changed:
        changed = False
        for move, has in zip(moves, held, strict=True):
            for pool, wanted in move.then.items():
                changed |= change(has, pool, max(0, min(wanted - has[pool], free[pool])))
            for pool in tuple(has):
                spare = has.total() - min(move.floor, sum(move.then.values()))
                changed |= change(has, pool, -max(0, min(has[pool] - move.then.get(pool, 0), spare)))
    return held
