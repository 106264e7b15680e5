"""The work of a worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shoal_trainer.worker.coordination import ControlPlane

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
def reporting(coordinator: ControlPlane, step: str, clock: Callable[[], float]) -> Iterator[None]:
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
