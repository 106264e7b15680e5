"""What a worker is given to do, and the seam to whoever gives it: the coordinator, or a fake in a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from shoal_trainer.wire.messages import Progress

Token = tuple[int, int]
"""The fencing token of a lease: (epoch of parameter server 0, counter)."""


@dataclass(frozen=True)
class DataWork:
    """A leased range: positions [start, stop) of pass `epoch` over the data, or of `file` (`stop` None: to its end)."""

    token: Token
    epoch: int
    start: int
    stop: int | None
    file: str | None = None
    number: int = -1
    """The file's, in the order of the job's files."""
    generation: int = 0
    """Of the parameters that the worker had when it asked."""


@dataclass(frozen=True)
class TaskWork:
    """A leased task. `history`: for callbacks, the logs of each epoch so far."""

    token: Token
    kind: Literal["evaluate", "callbacks", "export"]
    epoch: int = 0
    history: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True)
class Idle:
    """Nothing to do now; ask again after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Finished:
    """The job has ended; there is nothing to do any more."""

    message: str = ""


Work = DataWork | TaskWork | Idle | Finished

Words = str | Callable[[], str]
"""What is the matter; what changes with time is asked for at each heartbeat."""


class Wasted(NamedTuple):
    """How many `steps` of this worker were in vain so far, and how many of them the coordinator answered for."""

    steps: int = 0
    told: int = 0


class Coordinator(Protocol):
    """What a worker needs of the coordinator. All calls raise `Unreachable` or `Fenced`; any thread may call."""

    def join(self, held: Mapping[Token, DataWork], wasted: Wasted) -> Mapping[Token, Token]:
        """Say hello again, with what is held and how many steps were in vain; the leases' tokens of now."""

    def next_work(self, generation: int) -> Work:
        """Ask for something to do, with parameters of this generation."""

    def diverged(self, generation: int, batch: Progress, what: str) -> None:
        """Tell that a batch gave what is not finite; returns when shard 0 has gone back. `UserError`: it is the end."""

    def finished(self) -> bool:
        """Whether a heartbeat has learned that the job has finished. Returns at once."""

    def say(self, message: Words) -> None:
        """Tell what is the matter, beside the heartbeats, until another message (or none, "") takes its place."""

    def file_ended(self, token: Token, length: int) -> None:
        """Tell that a leased file has `length` samples, all of them in pushes."""

    def task_done(
        self,
        work: TaskWork,
        metrics: Mapping[str, float],
        files: Mapping[str, Path],
        *,
        stop: bool,
        message: str,
    ) -> None:
        """Give back what a task made. Files that are not there as they are now are streamed."""

    def leave(self) -> None:
        """Say goodbye: what is left of the leases is given back, up to the last push that was applied."""
