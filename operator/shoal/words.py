"""Numbers and times in words, for tables and messages, and what several parts say in the same words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime


def duration(seconds: float | None) -> str:
    """Seconds as 2d3h, 1h02m, 3m05s or 12s; None as a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def stamp(moment: datetime) -> str:
    """A moment in UTC as Kubernetes writes it, to the second."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def age(of: datetime | str | None, now: datetime) -> str:
    """How long ago, as `duration`."""
    if of is None or of == "":
        return "-"
    moment = datetime.fromisoformat(of) if isinstance(of, str) else of
    return duration((now - moment).total_seconds())


def decimal(text: str | None, digits: int = 1) -> str:
    """A decimal string of the API with so many digits; None as a dash."""
    return "-" if text is None else f"{float(text):,.{digits}f}"


def metric(value: str | float | None) -> str:
    """A loss or a metric, a number or a decimal string of the API, as Keras prints it; None as a dash."""
    if value is None:
        return "-"
    number = float(value)
    return f"{number:,.4f}" if abs(number) > 1e-3 or not number else f"{number:.4e}"


def percent(value: int | None) -> str:
    """A percentage, or a dash."""
    return "-" if value is None else f"{value}%"


def count(number: int, thing: str) -> str:
    """`1 worker`, `3 workers`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are: a message of 250 pods says nothing else."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def no_scheduler(name: str) -> str:
    """What is said of a pod that has waited for long and that no scheduler has tried to place."""
    return f"no scheduler has looked at it: is there one named {name}, and does it run?"
