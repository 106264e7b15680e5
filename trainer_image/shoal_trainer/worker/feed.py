"""The input: a thread that keeps the worker's next batches ready.

It asks the coordinator for work, reads leased ranges ahead into a short queue, and passes tasks through in their order.
Because it is one lease ahead of the step that runs, a worker never waits for the coordinator between two ranges.
A task may take minutes, so nothing is asked for beside one: what others could train would lie here.
What the thread meets (a user's error, the end of the job) arrives in the queue too, in its place. Where the data cannot
be reached it says so and tries again until they can; to end would help nobody.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Arrays, Indexed
from shoal_trainer.errors import TrainerError, Unreachable, UserError
from shoal_trainer.worker.work import DataWork, Finished, Idle, TaskWork, Work

log = logging.getLogger(__name__)

DEPTH = 4
"""Batches read ahead."""
RETRY_SECONDS = 0.25
"""The first pause before another try; the pauses of one outage of the data double, up to the longest."""
LONGEST_PAUSE = 30.0
STOP_SECONDS = 1.0
"""A full queue, or a task, is waited for this long before the thread looks whether it is told to stop."""


@dataclass(frozen=True)
class Ready:
    """A batch of a leased range."""

    work: DataWork
    batch: Batch


@dataclass(frozen=True)
class EndOfFile:
    """A leased file ended at `length` samples."""

    work: DataWork
    length: int


Item = Ready | EndOfFile | TaskWork | Finished | BaseException


class Feed:
    """Work for one worker, in order.

    `next_work()` asks the coordinator, and may block for a moment. `say` takes what is the matter with the data, and ""
    when that is over.
    """

    def __init__(
        self,
        data: Indexed | Arrays | Files,
        batch_size: int,
        next_work: Callable[[], Work],
        on_lease: Callable[[DataWork], None],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._next_work = next_work
        self._on_lease = on_lease
        self._say = say
        self._queue: queue.Queue[Item] = queue.Queue(DEPTH)
        self._stop = threading.Event()
        self._task_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to ask for work."""
        self._thread.start()

    def get(self, timeout: float) -> Item | None:
        """The next item; None where none came within `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def go_on(self) -> None:
        """The worker is through with the task that it got: ask for more."""
        self._task_done.set()

    def stop(self) -> None:
        """Ask for no more work; what is queued is dropped."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    work = self._next_work()
                except Unreachable:
                    self._stop.wait(RETRY_SECONDS)
                    continue
                if isinstance(work, Idle):
                    self._stop.wait(work.seconds)
                elif isinstance(work, DataWork):
                    self._on_lease(work)
                    for item in self._read(work):
                        self._put(item)
                        if self._stop.is_set():
                            return
                elif isinstance(work, TaskWork):
                    self._task_done.clear()
                    self._put(work)
                    while not self._stop.is_set() and not self._task_done.wait(STOP_SECONDS):
                        pass
                else:
                    self._put(work)
                    return
        except TrainerError as error:
            self._put(error)
        except Exception as error:
            from shoal_trainer.worker.entrypoint import where

            self._put(UserError(f"The data function failed: {where(error)}"))

    def _read(self, work: DataWork) -> Iterator[Item]:
        end, away, pause = work.start, False, RETRY_SECONDS
        while not self._stop.is_set():
            try:
                for batch in read(self._data, replace(work, start=end), self._batch_size):
                    end, away, pause = batch.end, False, RETRY_SECONDS
                    self._say("")
                    yield Ready(work, batch)
            except Unreachable as error:
                if not away:
                    log.warning("cannot read %s: trying again until it works", error)
                away = True
                self._say(f"cannot read {error}")
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._say("")
                if work.stop is None:
                    yield EndOfFile(work, end)
                return

    def _put(self, item: Item) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=STOP_SECONDS)
            except queue.Full:
                continue
            return


def read(data: Indexed | Arrays | Files, work: DataWork, batch_size: int) -> Iterator[Batch]:
    """The batches of a leased range."""
    if isinstance(data, Files):
        if work.file is None:
            raise UserError(
                "The coordinator leases ranges, but the training data are files: another image runs elsewhere."
            )
        return data.batches(work.file, work.start, work.stop, batch_size)
    if work.stop is None:
        raise UserError(
            "The coordinator leases files, but the training data are indexed: another image runs elsewhere."
        )
    return data.batches(work.epoch, work.start, work.stop, batch_size)
