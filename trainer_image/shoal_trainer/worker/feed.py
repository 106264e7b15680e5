"""The input: a thread that keeps the worker's next batches ready.

It asks the coordinator for work, reads leased ranges ahead into a short queue, and passes tasks through in their order.
Because it is one lease ahead of the step that runs, a worker never waits for the coordinator between two ranges.
A file of an object store comes whole before its first sample is read: while one is read, the next one is asked for and
fetched by a thread of its own. A task may take minutes, so nothing is asked for beside one: what others could train
would lie here. A task that is given for the next file is done at once, in the middle of this one.
What the thread meets (a user's error, the end of the job) arrives in the queue too, in its place. Where the data cannot
be reached it says so and tries again until they can; to end would help nobody. Of a read that hangs it cannot say
anything itself: the heartbeats ask for how long it has waited.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.source import Part, Source
from shoal_trainer.data.store import Ahead, Local, is_remote
from shoal_trainer.errors import TrainerError, Unreachable, UserError
from shoal_trainer.worker.work import DataWork, Finished, Idle, TaskWork, Words, Work

log = logging.getLogger(__name__)

DEPTH = 4
"""Batches read ahead."""
RETRY_SECONDS = 0.25
"""The first pause before another try; the pauses of one outage of the data double, up to the longest."""
LONGEST_PAUSE = 30.0
PATIENCE = 30.0
"""A batch that has not come for so many seconds is told of."""
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
    when that is over. `holds` tells whether a lease is still this worker's: what is not is read no further.
    """

    def __init__(
        self,
        data: Source,
        batch_size: int,
        next_work: Callable[[], Work],
        on_lease: Callable[[DataWork], None],
        say: Callable[[Words], None] = lambda _: None,
        *,
        holds: Callable[[DataWork], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._next_work = next_work
        self._on_lease = on_lease
        self._say = say
        self._holds = holds
        self._clock = clock
        self._next: tuple[DataWork, Ahead] | None = None
        """The lease after the one that is read, and its file."""
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
                if self._next is not None:
                    (work, ahead), self._next = self._next, None
                    items = self._read(work, ahead)
                elif (asked := self._ask()) is None:
                    self._stop.wait(RETRY_SECONDS)
                    continue
                elif isinstance(asked, Idle):
                    self._stop.wait(asked.seconds)
                    continue
                else:
                    items = self._read(asked) if isinstance(asked, DataWork) else iter([asked])
                for item in items:
                    self._hand_over(item)
                    if self._stop.is_set() or isinstance(item, Finished):
                        return
        except TrainerError as error:
            self._put(error)
        except (Exception, SystemExit) as error:  # nobody would know that this thread is gone
            from shoal_trainer.worker.entrypoint import where

            self._put(UserError(f"The data function failed: {where(error)}"))
        finally:
            if self._next is not None:
                self._next[1].discard()

    def _ask(self) -> Work | None:
        """What the coordinator gives; None where it does not answer."""
        try:
            work = self._next_work()
        except Unreachable:
            return None
        if isinstance(work, DataWork):
            self._on_lease(work)
        return work

    def _hand_over(self, item: Item) -> None:
        if not isinstance(item, TaskWork):
            self._put(item)
            return
        self._task_done.clear()
        self._put(item)
        while not self._stop.is_set() and not self._task_done.wait(STOP_SECONDS):
            pass

    def _read(self, work: DataWork, ahead: Ahead | None = None) -> Iterator[Item]:
        """What a lease holds, and what was given beside it. `ahead`: its file, where somebody fetches it already."""
        end, away, pause = work.start, False, RETRY_SECONDS
        look = work.file is not None and is_remote(work.file)
        here = ahead
        try:
            while not self._stop.is_set() and self._holds(work):
                try:
                    for batch in self._batches(replace(work, start=end), here):
                        end, away, pause = batch.end, False, RETRY_SECONDS
                        if look:
                            beside = self._look_ahead()
                            look = isinstance(beside, TaskWork)
                            if beside is not None:
                                yield beside
                        yield Ready(work, batch)
                        if not self._holds(work):
                            return
                except Unreachable as error:
                    if not away:
                        log.warning("cannot read %s: trying again until it works", error)
                    away, here = True, None
                    self._say(f"cannot read {error}")
                    self._stop.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                else:
                    if work.stop is None and not self._stop.is_set() and self._holds(work):
                        yield EndOfFile(work, end)
                    return
        finally:
            if ahead is not None:
                ahead.discard()

    def _batches(self, work: DataWork, ahead: Ahead | None) -> Iterator[Batch]:
        """The batches of a lease, as they come."""
        self._say(self._late(work))
        here = None if ahead is None else self._fetched(work, ahead)
        if ahead is None or here is not None:
            part = Part(work.start, work.stop, work.epoch, work.file)
            for batch in self._data.read(part, self._batch_size, here):
                self._say("")
                yield batch
                self._say(self._late(work))
        self._say("")

    def _fetched(self, work: DataWork, ahead: Ahead) -> Local | None:
        """A file that is being fetched; None where nobody wants it any more."""
        while not self._stop.is_set() and self._holds(work):
            try:
                return ahead.get(STOP_SECONDS)
            except TimeoutError:
                continue
        return None

    def _late(self, work: DataWork) -> Words:
        """What is to be said of a read that begins now, as long as it has not ended."""
        since, what = self._clock(), work.file or f"samples {work.start}-{work.stop}"

        def waited() -> str:
            seconds = self._clock() - since
            return f"has waited {seconds:.0f} s for {what}" if seconds >= PATIENCE else ""

        return waited

    def _look_ahead(self) -> TaskWork | Finished | None:
        """Ask for the next lease, and have its file fetched. What is no lease has its place before all that follows."""
        work = self._ask()
        if isinstance(work, DataWork) and work.file is not None:
            self._next = work, Ahead(work.file)
        return work if isinstance(work, TaskWork | Finished) else None

    def _put(self, item: Item) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=STOP_SECONDS)
            except queue.Full:
                continue
            return
