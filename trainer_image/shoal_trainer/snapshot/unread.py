"""Which files of a storage cannot be read: one alone, or all, as in an outage.

An outage keeps everything from being read, also what is read before a file: nobody begins from an older snapshot for
its sake. A file that fails while all else can be read is waited for, too, but not for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal_trainer.errors import SnapshotError, Unreachable

UNREAD_SECONDS, UNREAD_TRIES = 60.0, 3
"""A file that cannot be read for so long, and so often, is not waited for if an older snapshot can be read."""


@dataclass
class _Failing:
    """A file that cannot be read: when the attempts at it began, when the last one ended, how many, and why.

    In words: the error itself would keep in memory what the file was read into.
    """

    since: float
    last: float
    tries: int
    why: str

    @property
    def alone(self) -> bool:
        """Whether it has failed for so long that older snapshots are tried, until it is read."""
        return self.tries >= UNREAD_TRIES and self.last - self.since >= UNREAD_SECONDS


class Unread:
    """The files that could not be read when they were last tried."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: dict[str, _Failing] = {}

    @contextlib.contextmanager
    def reading(self, file: str, gone: str = "does not exist") -> Iterator[None]:
        """Its content is read.

        Raises:
            SnapshotError: it does not exist, or it alone cannot be read.
            Unreachable: it cannot be read now.
        """
        with self.looking(file, gone):
            yield
        self._failing.pop(file, None)

    @contextlib.contextmanager
    def looking(self, file: str, gone: str = "does not exist") -> Iterator[None]:
        """Something of it is read that does not show whether its content can be. Raises as `reading`."""
        began = self._clock()
        try:
            yield
        except FileNotFoundError:
            raise SnapshotError(f"{file} {gone}") from None
        except Unreachable as error:
            failing = self._failing.get(file)
            if failing is None or (not failing.alone and began - failing.last > UNREAD_SECONDS):
                failing = _Failing(began, began, 0, "")
            failing = _Failing(failing.since, self._clock(), failing.tries + 1, str(error))
            self._failing[file] = failing
            if not failing.alone:
                raise
            raise SnapshotError(f"{file} alone cannot be read: {error}") from None

    def since(self, time: float) -> dict[str, str]:
        """The files that could not be read from that time on, and why."""
        return {file: failing.why for file, failing in self._failing.items() if failing.last >= time}
