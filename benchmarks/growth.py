"""Judges whether the processes of a long run grew: memory, descriptors and threads. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

WINDOW = 180.0
"""Seconds at either end of a life whose medians are compared; a third of a shorter life."""
MIN_LIFE = 120.0
"""The shortest span of readings in seconds for a growth measurement."""
MAX_GAP = 60.0
"""A survivor must have readings up to this many seconds before the end of the run."""
SURVIVOR = {"memory": 16e6, "descriptors": 4.0, "threads": 4.0}
"""The growth allowed to a process that is never killed, over its whole life.

Constants, so that a longer run makes the bound on the rate tighter. 16 MB is three times the largest growth in lives
of five minutes, in which buffers and arenas reach their final size; a leak of 10 MB in 5 minutes makes 110 MB in an
hour. Descriptors and threads: a killed worker and its replacement have two connections each.
"""
SHORT = {"memory": (1.25, 16e6), "descriptors": (1.25, 8.0), "threads": (1.25, 8.0)}
"""The growth allowed in a shorter life, most of which is warm-up: a factor and a constant."""
UNITS = {"memory": 1e6}


@dataclass(frozen=True)
class Reading:
    """A reading of one process at an age in seconds: memory in bytes (USS), open descriptors, threads."""

    age: float
    memory: float
    descriptors: float
    threads: float


@dataclass(frozen=True)
class Growth:
    """One quantity of one process: medians at the start and at the end of its life, and the allowed end."""

    quantity: str
    start: float
    end: float
    allowed: float

    @property
    def exceeded(self) -> bool:
        """Whether the process grew more than is allowed."""
        return self.end > self.allowed

    def __str__(self) -> str:
        unit = UNITS.get(self.quantity, 1.0)
        return f"{self.start / unit:.0f} → {self.end / unit:.0f} (≤ {self.allowed / unit:.0f})"


@dataclass(frozen=True)
class Life:
    """The growth of one process over its life of `seconds`."""

    name: str
    survivor: bool
    seconds: float
    growth: tuple[Growth, ...]

    @property
    def grew(self) -> bool:
        """Whether any quantity exceeded its bound."""
        return any(one.exceeded for one in self.growth)


def judge(
    readings: Mapping[str, Sequence[Reading]], survivors: Collection[str], seconds: float
) -> tuple[list[Life], list[str]]:
    """The lives, survivors and longest first, and the reasons for which the run fails.

    `survivors`: the processes that are never killed. `seconds`: the length of the run.
    """
    lives, reasons = [], []
    for name, life in readings.items():
        if life and life[-1].age - life[0].age >= MIN_LIFE:
            survivor = name in survivors
            growth = tuple(_growth(life, quantity, survivor) for quantity in SURVIVOR)
            lives.append(Life(name, survivor, life[-1].age, growth))
    lives.sort(key=lambda life: (not life.survivor, -life.seconds))
    for name in survivors:
        judged = next((life for life in lives if life.name == name), None)
        if judged is None or judged.seconds < seconds - MAX_GAP:
            age = judged.seconds if judged else 0
            reasons.append(f"{name} was not killed, but was last read at {age:.0f} s of {seconds:.0f} s")
    reasons += [f"{life.name}: {one.quantity} {one}" for life in lives for one in life.growth if one.exceeded]
    return lives, reasons


def _growth(life: Sequence[Reading], quantity: str, survivor: bool) -> Growth:
    first, last = life[0].age, life[-1].age
    window = min(WINDOW, (last - first) / 3)
    start = statistics.median(getattr(r, quantity) for r in life if r.age <= first + window)
    end = statistics.median(getattr(r, quantity) for r in life if r.age >= last - window)
    if not survivor:
        factor, constant = SHORT[quantity]
        return Growth(quantity, start, end, factor * start + constant)
    return Growth(quantity, start, end, start + SURVIVOR[quantity])
