"""How things are put in words and times: small helpers that every policy needs."""

from __future__ import annotations

from datetime import datetime

from shoal.api.kube import Pod


def whole(moment: datetime) -> datetime:
    """The moment without its fraction: what a status shows."""
    return moment.replace(microsecond=0)


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text) if text else None


def seconds_between(earlier: datetime, later: datetime) -> int:
    """Whole seconds, never negative."""
    return max(0, round((later - earlier).total_seconds()))


def role_word(role: str) -> str:
    """What people call it."""
    return "parameter server" if role == "ps" else "worker"


def is_running(pod: Pod) -> bool:
    """Its containers run (a parameter server: and it is ready)."""
    return pod.status.phase == "Running"


def conclusion(text: str) -> str:
    """The last line that says something: where a log ends in a traceback, the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def short(text: str, limit: int = 1000) -> str:
    """Text that fits into a status: the end is what a traceback is read for."""
    text = text.strip()
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
