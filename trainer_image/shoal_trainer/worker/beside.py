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
    """Adds it up. One thread writes, any may read: what they read is replaced as a whole."""

    def __init__(self) -> None:
        self._now: tuple[Passed, float | None] = Passed(), None
        """What is over, and since when a task runs."""

    def task_begins(self, since: float) -> None:
        """A task begins; `since` the last push, the time is no step's."""
        self._now = self._now[0], since

    def task_ended(self, now: float) -> None:
        """The task is over, if there was one."""
        self._now = self.passed(now), None

    def waited(self, seconds: float) -> None:
        """There was no work for so long."""
        passed, since = self._now
        self._now = passed._replace(waits=passed.waits + max(seconds, 0.0)), since

    def passed(self, now: float) -> Passed:
        """All of it, with the task that runs."""
        passed, since = self._now
        return passed if since is None else passed._replace(tasks=passed.tasks + max(now - since, 0.0))
