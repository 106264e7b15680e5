"""Numbers and times in words, for tables and messages, and what several parts say in the same words. Pure."""

from __future__ import annotations

import math
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


def number(value: str | float | None) -> float | None:
    """A number, or a decimal string of the API; None of what is neither: a status may be another controller's."""
    try:
        found = math.nan if value is None else float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def decimal(text: str | None, digits: int = 1) -> str:
    """A decimal string of the API with so many digits; a dash if it is no number."""
    found = number(text)
    return "-" if found is None else f"{found:,.{digits}f}"


def metric(value: str | float | None) -> str:
    """A loss or a metric, a number or a decimal string of the API, as Keras prints it; a dash if it is neither."""
    if (found := number(value)) is None:
        return "-"
    return f"{found:,.4f}" if abs(found) > 1e-3 or not found else f"{found:.4e}"


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
