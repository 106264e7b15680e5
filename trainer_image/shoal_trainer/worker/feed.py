"""The read-ahead thread: requests work from the coordinator and queues the next batches, tasks and errors in order.

It requests the next lease while the last batches of the current one are queued, so the worker does not wait between
leases; during a task it requests none, because other workers could train it. While a file of an object store is read,
the next one is downloaded; if the coordinator assigns a task instead, the task runs before the rest of the file.
Unreachable data are retried without limit and reported in the heartbeats; a read that hangs is reported as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.downloads import Download, Prefetch, is_remote
from shoal_trainer.data.source import Part, Source
from shoal_trainer.errors import TrainerError, Unreachable, UserError
from shoal_trainer.retry import FIRST_PAUSE, Backoff
from shoal_trainer.worker.work import DataWork, Finished, Idle, StatusText, TaskWork, Work, waiting_for

log = logging.getLogger(__name__)

DEPTH = 4
"""Batches read ahead."""
REFILL = 1
"""When only this many are left, the thread reads more: waking it for each batch would disturb the step more often."""
STOP_SECONDS = 1.0
"""A blocked thread checks this often whether it must stop."""


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


@dataclass(frozen=True)
class Failed:
    """A leased range that cannot be read. It fails the job, unless this worker has lost the lease."""

    work: DataWork
    error: UserError


Item = Ready | EndOfFile | Failed | TaskWork | Finished | BaseException


class Feed:
    """Work for one worker, in order.

    `next_work` requests work from the coordinator. `set_message` gets the state of unreachable data, and "" when they
    are reachable. `holds` returns whether this worker still holds a lease; others are not read further. `check` raises
    `UserError` for a batch that the model cannot learn.
    """

    def __init__(
        self,
        data: Source,
        batch_size: int,
        next_work: Callable[[], Work],
        on_lease: Callable[[DataWork], None],
        set_message: Callable[[StatusText], None] = lambda _: None,
        *,
        holds: Callable[[DataWork], bool] = lambda _: True,
        check: Callable[[Batch], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._next_work = next_work
        self._on_lease = on_lease
        self._set_message = set_message
        self._holds = holds
        self._check = check
        self._clock = clock
        self._next: tuple[DataWork, Prefetch] | None = None
        """The lease after the current one, and its file."""
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._task_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Start requesting work."""
        self._thread.start()

    def get(self, timeout: float) -> Item | None:
        """The next item; None if there is none within `timeout` seconds."""
        with self._changed:
            if not self._queue and not self._changed.wait_for(lambda: self._queue, timeout):
                return None
            item = self._queue.popleft()
            if len(self._queue) == REFILL:
                self._changed.notify()
            return item

    def upcoming(self) -> Batch | None:
        """The batch that `get` returns next; None if it is not read yet, or something else is next."""
        with self._changed:
            item = self._queue[0] if self._queue else None
        return item.batch if isinstance(item, Ready) else None

    def task_finished(self) -> None:
        """The worker has finished its task: request more work."""
        self._task_done.set()

    def stop(self) -> None:
        """Stop requesting work, and drop the queue."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._next is not None:
                    (lease, prefetch), self._next = self._next, None
                    items = self._read(lease, prefetch)
                elif (work := self._request()) is None:
                    self._stop.wait(FIRST_PAUSE)
                    continue
                elif isinstance(work, Idle):
                    self._stop.wait(work.seconds)
                    continue
                else:
                    items = self._read(work) if isinstance(work, DataWork) else iter([work])
                for item in items:
                    self._hand_over(item)
                    if self._stop.is_set() or isinstance(item, Finished):
                        return
        except Exception as error:  # else the worker would wait for this thread forever
            self._put(error)
        finally:
            if self._next is not None:
                self._next[1].discard()

    def _request(self) -> Work | None:
        """Request work; None if the coordinator does not answer."""
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

    def _read(self, work: DataWork, prefetch: Prefetch | None = None) -> Iterator[Item]:
        """The batches of a lease, and the tasks assigned while it is read. `prefetch`: its file, if in download.

        An error ends this lease only: if training has ended meanwhile, the worker still has to run tasks.
        """
        end, backoff = work.start, Backoff(FIRST_PAUSE)
        may_prefetch = work.file is not None and is_remote(work.file)
        download = prefetch
        try:
            while not self._stop.is_set() and self._holds(work):
                try:
                    for batch in self._batches(replace(work, start=end), download):
                        end = batch.end
                        backoff.reset()
                        if may_prefetch:
                            upcoming = self._prefetch_next()
                            may_prefetch = isinstance(upcoming, TaskWork)
                            if upcoming is not None:
                                yield upcoming
                        yield Ready(work, batch)
                        if not self._holds(work):
                            return
                except Unreachable as error:
                    if backoff.is_new(error):
                        log.warning("cannot read %s; retrying", error)
                    download = None
                    self._set_message(f"cannot read {error}")
                    backoff.wait(self._stop)
                except UserError as error:
                    yield self._failed(work, error)
                    return
                except TrainerError:
                    raise
                except (Exception, SystemExit) as error:
                    from shoal_trainer.data.user_code import where

                    yield self._failed(work, UserError(f"The data function failed: {where(error)}"))
                    return
                else:
                    if work.stop is None and not self._stop.is_set() and self._holds(work):
                        yield EndOfFile(work, end)
                    return
        finally:
            if prefetch is not None:
                prefetch.discard()

    def place(self, work: DataWork) -> str:
        """What is read, for errors: positions are rows of the data only in the order in which an epoch visits them.

        Of a stream, which each worker reads from a place of its own, none is said.
        """
        if work.file is not None:
            return work.file
        if self._data.describe().order:
            return f"{work.source} in the order of epoch {work.epoch + 1}"
        return f"a batch of a stream, which is read for the {work.source} of epoch {work.epoch + 1} and has no numbers"

    def _batches(self, work: DataWork, prefetch: Prefetch | None) -> Iterator[Batch]:
        """Read the batches of a lease, and report slow reads."""
        self._set_message(waiting_for(work.source, self._clock))
        download = None if prefetch is None else self._downloaded(work, prefetch)
        if prefetch is None or download is not None:
            part = Part(work.start, work.stop, work.epoch, work.file)
            batches = self._data.read(part, self._batch_size, download)
            while (batch := next(batches, None)) is not None:
                self._set_message("")
                try:
                    self._check(batch)
                except UserError as error:
                    raise UserError(f"{self.place(work)}: {error}") from error
                yield batch
                self._set_message(waiting_for(work.source, self._clock))
        self._set_message("")

    def _failed(self, work: DataWork, error: UserError) -> Failed:
        self._set_message("")  # it reads no more
        return Failed(work, error)

    def _downloaded(self, work: DataWork, prefetch: Prefetch) -> Download | None:
        """The downloaded file; None if this worker stops or loses the lease."""
        while not self._stop.is_set() and self._holds(work):
            try:
                return prefetch.get(STOP_SECONDS)
            except TimeoutError:
                continue
        return None

    def _prefetch_next(self) -> TaskWork | Finished | None:
        """Request the next lease and start to download its file; returns other work, which goes first."""
        work = self._request()
        if isinstance(work, DataWork) and work.file is not None:
            self._next = work, Prefetch(work.file)
        return work if isinstance(work, TaskWork | Finished) else None

    def _put(self, item: Item) -> None:
        with self._changed:
            if len(self._queue) >= DEPTH:
                while len(self._queue) > REFILL and not self._stop.is_set():
                    self._changed.wait(STOP_SECONDS)
            self._queue.append(item)
            if len(self._queue) == 1:
                self._changed.notify()
