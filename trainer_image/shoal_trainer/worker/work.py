"""The work of a worker, and the interface of the coordinator that assigns it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from shoal_trainer.wire.messages import Progress

Token = tuple[int, int]
"""The fencing token of a lease: (term of the coordinator process, counter)."""


@dataclass(frozen=True)
class DataWork:
    """A leased range: positions [start, stop) of the data, or of `file` (`stop` None: to its end), in `epoch`."""

    token: Token
    epoch: int
    start: int
    stop: int | None
    file: str | None = None
    number: int = -1
    """The index of the file in the job's list."""
    generation: int = 0
    """Of the worker's parameters at the request."""

    @property
    def source(self) -> str:
        """What is read, for messages: the file, or the samples."""
        return self.file or f"samples {self.start}-{self.stop}"


@dataclass(frozen=True)
class TaskWork:
    """A leased task.

    For callbacks and the export: the `history`, which is the logs of each epoch so far. For callbacks: the learning
    rate that they have set for the job, if they have.
    """

    token: Token
    kind: Literal["evaluate", "callbacks", "export"]
    epoch: int = 0
    history: tuple[dict[str, float], ...] = ()
    learning_rate: float | None = None


@dataclass(frozen=True)
class Idle:
    """No work now; ask again after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Finished:
    """The job has ended."""

    message: str = ""


Work = DataWork | TaskWork | Idle | Finished

StatusText = str | Callable[[], str]
"""A status message of a worker, or a function that returns the current one at each heartbeat."""


class About(Enum):
    """What a status message is about. Of several messages, the heartbeats carry the first in this order."""

    CONNECTION = "parameter servers that take no connection"
    OUTAGE = "an unreachable parameter server"
    WORK = "data or a task"
    STEP = "a training step"
    FILES = "files of callbacks that the storage has yet to take"


JOINED = "joined"
"""In a worker's log, once it has the parameters."""

SLOW_SECONDS = 30.0
"""The heartbeats report a read that takes longer."""
SLOW_WORK_SECONDS = 300.0
"""The heartbeats report a task or a training step that takes longer."""


def waiting_for(
    what: str, clock: Callable[[], float] = time.monotonic, *, slow: float = SLOW_SECONDS
) -> StatusText:
    """The status message of a wait that starts now: empty for the first `slow` seconds."""
    started = clock()

    def message() -> str:
        seconds = clock() - started
        return f"has waited {seconds:.0f} s for {what}" if seconds >= slow else ""

    return message


@contextlib.contextmanager
def reporting(coordinator: Coordinator, step: str, clock: Callable[[], float]) -> Iterator[None]:
    """Make the heartbeats report this `step` if it takes long."""
    coordinator.set_message(waiting_for(step, clock, slow=SLOW_WORK_SECONDS), About.STEP)
    try:
        yield
    finally:
        coordinator.set_message("", About.STEP)


class Wasted(NamedTuple):
    """The wasted `steps` of this worker so far, and how many of them the coordinator has acknowledged."""

    steps: int = 0
    acknowledged: int = 0
    known_samples: int = 0
    """The samples in the parameters when this worker last reached shard 0, which was lost since; 0: it was not."""


class Coordinator(Protocol):
    """The coordinator as a worker uses it. Methods raise `Unreachable` or `Fenced`, and are thread-safe."""

    def join(self, leases: Mapping[Token, DataWork], wasted: Wasted) -> Mapping[Token, Token]:
        """Join with this worker's leases and wasted steps; returns the new tokens of the leases that continue."""

    def next_work(self, generation: int, stopped: int | None) -> Work:
        """Request work for parameters of this generation. `stopped`: the term that is known to have ended training."""

    def diverged(self, generation: int, batch: Progress, reason: str) -> None:
        """Report a non-finite batch; returns when shard 0 has rolled back. `UserError` if the job cannot roll back."""

    def finished(self) -> bool:
        """Whether a heartbeat was answered that the job has finished, or raises why one was refused. Does not block."""

    def learning_rate(self) -> float | None:
        """The learning rate that a callback has set for all workers; None if none has. Does not block."""

    def set_message(self, message: StatusText, about: About = About.WORK) -> None:
        """Set a message for the heartbeats; "" for none."""

    def file_ended(self, token: Token, length: int) -> None:
        """Report that a leased file has `length` samples, all of which were pushed."""

    def task_done(
        self,
        work: TaskWork,
        metrics: Mapping[str, float],
        files: Mapping[str, Path],
        *,
        stop: bool,
        message: str,
        learning_rate: float | None = None,
    ) -> None:
        """Upload the new and changed files, and send the result of a task.

        `learning_rate`: the new one of all workers, if a callback has set it.
        """

    def fetch(self, work: TaskWork, name: str, path: Path) -> bool:
        """Write a file that an earlier task of the run uploaded to `path`, for an export; False if there is none."""

    def leave(self, wasted: Wasted, seconds: float) -> None:
        """Leave the job, within `seconds`; the coordinator releases the rest of the leases."""
