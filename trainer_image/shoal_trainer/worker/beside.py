"""The time of a worker that belongs to no training step: in tasks, and without work.

It is what the times of steps leave out, so that both together are all of the worker's time. A job with an evaluation
after each epoch is predicted from both.
"""

from __future__ import annotations

from typing import NamedTuple


class Passed(NamedTuple):
    """Seconds since the worker's start in `tasks`, and in `waits` for work."""

    tasks: float = 0.0
    waits: float = 0.0


class Beside:
    """Adds it up. One thread writes, any may read."""

    def __init__(self) -> None:
        self._passed = Passed()
        self._task_since: float | None = None

    def task_begins(self, since: float) -> None:
        """A task begins; `since` the last push, the time is no step's."""
        self._task_since = since

    def task_ended(self, now: float) -> None:
        """The task is over."""
        if self._task_since is not None:
            self._passed = self._passed._replace(tasks=self._passed.tasks + max(now - self._task_since, 0.0))
        self._task_since = None

    def waited(self, seconds: float) -> None:
        """There was no work for so long."""
        self._passed = self._passed._replace(waits=self._passed.waits + max(seconds, 0.0))

    def passed(self, now: float) -> Passed:
        """All of it, with the task that runs."""
        passed, since = self._passed, self._task_since
        return passed if since is None else passed._replace(tasks=passed.tasks + max(now - since, 0.0))
