"""How fast the machine under the nodes was, as seen by what a step costs it: seconds of processor time.

All steps of the story do the same work, so a step that takes twice the processor time was made while the machine was
half as fast: two virtual processors may be one real core, and neighbours take caches and memory. On a cloud each node
is a machine of its own. Here two figures of different minutes can only be compared at one pace of the machine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dev.demo.pools.record import Moment, WorkerSeen

WINDOW_SECONDS = 20.0


def passed(moments: Iterable[Moment]) -> Iterator[tuple[WorkerSeen, WorkerSeen, float]]:
    """Each settled worker in two moments, one after the other, and the seconds between them."""
    for old, new in itertools.pairwise(moments):
        before = {worker.key: worker for worker in old.workers if worker.settled}
        for worker in new.workers:
            if worker.key in before:
                yield before[worker.key], worker, new.at - old.at


def step_cpu(moments: Iterable[Moment], pools: Iterable[str]) -> float | None:
    """Seconds of processor time of a step in these pools, without tasks; None: none was seen.

    A worker that is held to its share uses it all, in tasks as well: their part of it is their part of the time.
    """
    wanted, steps, cpu = set(pools), 0, 0.0
    for old, new, seconds in passed(moments):
        if new.pool in wanted and seconds > 0 and new.used.cpu > old.used.cpu > 0:
            steps += new.steps - old.steps
            cpu += (new.used.cpu - old.used.cpu) * max(0.0, 1 - (new.beside - old.beside) / seconds)
    return cpu / steps if steps and cpu else None


def slower(
    then: tuple[Iterable[Moment], Iterable[str]], now: tuple[Iterable[Moment], Iterable[str]]
) -> float:
    """How many times slower the machine was in the moments `now`, seen in some pools, than `then`; 1: not known."""
    before, after = step_cpu(*then), step_cpu(*now)
    return after / before if before and after else 1.0


def alike(pool: str, cores: Mapping[str, float]) -> set[str]:
    """The pools whose machines have as much of a core: to a SpeedProfile they are one."""
    return {each for each in cores if cores[each] == cores.get(pool)} | {pool}


def over_time(moments: Sequence[Moment]) -> list[list[float]]:
    """[seconds after the start, ms of processor time of a step] of every 20 s in which workers had settled."""
    windows = defaultdict[int, list[Moment]](list)
    for now in moments:
        windows[int(now.at // WINDOW_SECONDS)].append(now)
    found = ((n, step_cpu(part, {w.pool for m in part for w in m.workers})) for n, part in windows.items())
    return [[n * WINDOW_SECONDS, round(1000 * cpu, 2)] for n, cpu in found if cpu]
