"""How far all plans of some time agree on a change: what is to last is the wish for more or fewer workers.

A proposal follows what runs and what is counted, so it may change a little each minute. If it had to stay the same for
five minutes, a job that needs one worker less each time would never give up any. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["agreed", "lasting"]

Moment = TypeVar("Moment")


def lasting(
    now: Mapping[str, int],
    wishes: Sequence[tuple[Moment, Mapping[str, int]]],
    is_recent: Callable[[Moment], bool],
) -> dict[str, int]:
    """The counts after what has been wished for long enough: `now`, while even the first wish is recent.

    Args:
        now: workers by pool that are wanted now.
        wishes: since when each was proposed instead, the oldest first.
        is_recent: whether so little time has passed since then that a change has to wait.

    """
    if is_recent(wishes[0][0]):
        return dict(now)
    ends = (since for since, _ in wishes[1:])
    recent = [counts for (_, counts), end in zip(wishes, ends, strict=False) if is_recent(end)]
    return agreed(now, [*recent, wishes[-1][1]])


def agreed(now: Mapping[str, int], proposals: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The smallest change to which all of the proposals agree, by pool and in all pools together.

    Of two workers of which each proposal ends another one, the one goes that the newest ends.

    Args:
        now: workers by pool that are wanted now.
        proposals: what was proposed instead, the newest last.

    """
    newest, sums = proposals[-1], [sum(each.values()) for each in proposals]
    total = min(max(sum(now.values()), min(sums)), max(sums))
    counts = {name: min(count, newest.get(name, 0)) for name, count in now.items()}
    stay = {name: min(n, max(each.get(name, 0) for each in proposals)) for name, n in now.items()}
    for goals in (stay, newest):  # what some of them keep stays, and there comes what is new
        for name, goal in goals.items():
            more = min(goal - counts.get(name, 0), total - sum(counts.values()))
            counts[name] = counts.get(name, 0) + max(more, 0)
    return {name: count for name, count in counts.items() if count}
