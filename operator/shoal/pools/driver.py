"""What can be sized: one small interface, an implementation for each mode, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal.cluster.transport import Answer
from shoal.errors import Busy, ScalingError, SizedByOther, Unavailable
from shoal.pools.rules import Pace, Target

Fence = Callable[[], object]
"""Raises `LeaseLost` once no size may be set, as in a process that was stopped for a while: called in the thread of a
cloud's client, just before it sends. Requests to the API server have theirs (`Fenced`)."""


class Driver(Protocol):
    """Sizes one target.

    All methods raise `ScalingError` with what to do, if nothing was done, or `Unavailable`: it may have been done, or
    may succeed later.
    """

    @property
    def pace(self) -> Pace:
        """How fast sizes may follow each other."""
        ...

    async def read(self) -> Target:
        """What the target is like now."""
        ...

    async def resize(self, nodes: int, seen: Target, /) -> None:
        """Set the size, if the target is still as it was `seen`.

        Raises:
            SizedByOther: someone else sets it.
            Busy: it has changed, or changes now: read it again.
        """
        ...

    async def let_go(self) -> None:
        """Remove what Shoal made, after the size was given back."""
        ...


def checked(answer: Answer, what: str, doing: str) -> Answer:
    """The answer, if the API server did what it was asked.

    Raises:
        ScalingError: it did not.
    """
    if answer.ok:
        return answer
    words = f"cannot {doing} {what}: {answer.message}"
    match answer.status:
        case 401 | 403:
            raise ScalingError("Forbidden", f"{words}; grant it to the service account of shoal-pools")
        case 404 if answer.is_absent:
            raise ScalingError("TargetNotFound", f"{words}; create it, or correct spec.scaling")
        case 409 if answer.reason == "Conflict" and "pply failed" in answer.message:
            raise SizedByOther("FieldManager", answer.message)
        case 409:
            raise Busy("Changed", words)
        case 400 | 405 | 415 | 422:
            raise ScalingError("Refused", words)
        case _:
            raise Unavailable(words)
