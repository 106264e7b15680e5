"""Times as Kubernetes objects and the status hold them."""

from __future__ import annotations

from datetime import datetime, timedelta

TOLERATED = timedelta(seconds=5)
"""Clocks that somebody sets differ by less, and whole seconds are rounded."""


def whole(moment: datetime) -> datetime:
    """The moment without its fraction of a second, as in a status."""
    return moment.replace(microsecond=0)


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text) if text else None


def seconds_between(earlier: datetime, later: datetime) -> int:
    """Whole seconds, never negative."""
    return max(0, round((later - earlier).total_seconds()))
