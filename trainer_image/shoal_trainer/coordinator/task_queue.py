"""The queue of tasks: evaluate an epoch, run the callbacks of an epoch, export the model. Pure.

A task is leased to one worker, and reassigned if that worker is lost. Tasks run in order: callbacks see the metrics of
their epoch, and the export is last. The worker that evaluated an epoch also runs its callbacks, because it has the
parameters that were evaluated: a checkpoint of the best epoch contains these. It does so in the next epochs, too, while
it is there: it has made the callbacks, and what they know of the epochs before.

While a worker sends files of callbacks later (see `callback_files`), all tasks are its own, so that it replaces no file
of another worker by an older one, and the export waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shoal_trainer.coordinator.callback_files import NOTHING, CallbackFiles
from shoal_trainer.ps.contents import Worker

Kind = Literal["evaluate", "callbacks", "export"]
RESERVED_SECONDS = 30.0
"""How long a task waits for the worker that it is meant for: it may have lost its connection to a parameter server."""


@dataclass
class Task:
    """One task. `holder`: the worker to which it is leased, under `token`."""

    kind: Kind
    epoch: int
    holder: Worker | None = None
    token: tuple[int, int] = (0, 0)


@dataclass
class Tasks:
    """The queue, and the `history`: one entry per epoch, like the logs of Keras, replaced and never changed."""

    queue: list[Task] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    evaluated: int = 0
    """Epochs whose tasks were queued."""
    exported: bool = False
    learning_rate: float | None = None
    """Of all workers, if a callback has set it."""
    evaluator: Worker | None = None
    """The worker that did the last evaluation, until it is lost."""
    caller: Worker | None = None
    """The worker that ran the last callbacks, until it is lost."""
    files: CallbackFiles = field(default_factory=CallbackFiles)
    reserved_until: float = 0.0
    """Until when the first task is for the worker that it is meant for."""
    _complete: list[dict[str, float]] | None = None
    """What `complete` has returned since the last change."""

    def epoch_ended(
        self, epoch: int, logs: dict[str, float], now: float, *, validation: bool, callbacks: bool
    ) -> None:
        """Record the loss and metrics of training in a complete epoch, and queue its tasks."""
        self._add(epoch, logs)
        self.evaluated = epoch + 1
        if any(task.kind == "export" for task in self.queue):  # a late push completed an epoch after the stop
            return
        if not self.queue:
            self.reserved_until = now + RESERVED_SECONDS
        # The new evaluation replaces one that has not started: both would use the current parameters.
        if not callbacks:
            self.queue = [t for t in self.queue if t.holder is not None or t.kind != "evaluate"]
        if validation:
            self.queue.append(Task("evaluate", epoch))
        if callbacks:
            self.queue.append(Task("callbacks", epoch))

    def export(self, epoch: int) -> bool:
        """Queue the export, unless it is queued or done; returns whether it was queued."""
        if self.ending:
            return False
        self.queue.append(Task("export", epoch))
        return True

    def complete(self) -> list[dict[str, float]]:
        """The history up to the first epoch that still has a task; the same list until that changes."""
        if self._complete is None:
            open_epochs = (task.epoch for task in self.queue if task.kind != "export")
            self._complete = self.history[: min(open_epochs, default=None)]
        return self._complete

    @property
    def holder(self) -> Worker | None:
        """The worker that runs a task now."""
        return self.queue[0].holder if self.queue else None

    @property
    def lagging(self) -> bool:
        """Whether tasks of more than one epoch are queued or running."""
        return len({task.epoch for task in self.queue}) > 1

    def first_unjudged(self, completed: int, trains: Callable[[Worker], bool]) -> int:
        """The first epoch of which no worker has begun a task.

        `completed`: how many epochs are complete. `trains`: whether a worker has steps to do before its task.
        """
        if not self.queue:
            return completed
        first = self.queue[0]
        if first.holder is not None:
            begun = not trains(first.holder)
        else:  # the callbacks of an epoch that is evaluated use the same parameters
            begun = first.kind == "callbacks" and self.evaluator is not None
        return completed if begun else first.epoch

    def awaited(self, now: float) -> Worker | None:
        """The worker that holds the first task, or has to run it; None if there is no task, or any worker may."""
        if not self.queue:
            return None
        first = self.queue[0]
        if first.holder is not None or self.files.sender is not None:
            return first.holder or self.files.sender
        if now >= self.reserved_until:
            return None
        match first.kind:
            case "evaluate":
                return self.caller
            case "callbacks":
                return self.evaluator or self.caller
            case "export":
                return None

    def grant(self, worker: Worker, token: tuple[int, int], now: float) -> Task | None:
        """Lease the first task; None if it is leased already, or another worker's."""
        if not self.queue or self.awaited(now) not in {None, worker} or self.queue[0].holder is not None:
            return None
        task = self.queue[0]
        if task.kind == "export" and self.files.sender is not None:
            return None
        task.holder, task.token = worker, token
        return task

    def held(self, worker: Worker, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token."""
        task = self.queue[0] if self.queue else None
        matches = task is not None and task.holder == worker and task.token == token
        return task if matches else None

    def done(
        self,
        token: tuple[int, int],
        metrics: dict[str, float],
        now: float,
        learning_rate: float | None = None,
    ) -> Task | None:
        """Record a result; None if the task was reassigned."""
        if not self.queue or self.queue[0].holder is None or self.queue[0].token != token:
            return None
        task = self.queue.pop(0)
        if learning_rate is not None:
            self.learning_rate = learning_rate
        self.evaluator = task.holder if task.kind == "evaluate" else None
        if task.kind == "callbacks":
            self.caller = task.holder
        self.reserved_until = now + RESERVED_SECONDS
        self._add(task.epoch, metrics)
        self.exported = self.exported or task.kind == "export"
        return task

    def joins(
        self, worker: Worker, unsent: Collection[str], called: int | None, written: Mapping[str, int]
    ) -> None:
        """A worker joins, and has yet to send these files; see `sends_later`. `called`: None of a new process."""
        if called is not None:
            self.sends_later(worker, unsent, called, written)
        else:
            self.files.begins_anew(worker)

    def sends_later(
        self,
        worker: Worker,
        names: Collection[str],
        called: int | None = None,
        written: Mapping[str, int] = NOTHING,
        copies: Mapping[str, int] = NOTHING,
    ) -> bool:
        """This worker has yet to send these files of callbacks, and no others. False if others follow it.

        `called`: the newest epoch whose callbacks it has run; None: unknown. `written`: the epoch of each of these
        files, and of those that it has given up; an earlier version does not say it. `copies`: see `File`.
        """
        first = self.queue[0] if self.queue else None
        holder = first.holder if first is not None and first.kind != "evaluate" else None
        writes = len(self.complete()) if holder == worker else None
        # What it wrote in an epoch that is to come again is as new as the last one that is complete.
        newest = len(self.complete()) - (writes is None)
        said = newest if called is None else called
        waits = {name: min(newest, written.get(name, said)) for name in names}
        given_up = {name: min(newest, epoch) for name, epoch in written.items() if name not in waits}
        alone = (holder or self.caller) in {None, worker}
        return self.files.sends_later(
            worker, waits, given_up, writes=writes, alone=alone, told=written, copies=copies
        )

    def stores(self, worker: Worker, token: tuple[int, int], name: str) -> None:
        """This worker has stored a file of the callbacks that it runs."""
        if (task := self.held(worker, token)) is not None:
            self.files.stored(name, task.epoch)

    def leave_out(self, names: Mapping[str, str], written: Mapping[str, int] = NOTHING) -> None:
        """These files never come; see `CallbackFiles`. `written`: the epoch of each."""
        self.files.leave_out(names, written, newest=len(self.complete()))

    def _add(self, epoch: int, logs: dict[str, float]) -> None:
        self._complete = None
        while len(self.history) <= epoch:
            self.history.append({})
        self.history[epoch] = self.history[epoch] | logs

    def resume_after(self, epochs: int) -> None:
        """Begin another run after so many complete epochs: the epoch that an earlier stop ended goes on."""
        self.evaluator = None
        self.files = CallbackFiles()  # of the other run's folder
        self._complete = None
        self.queue = [task for task in self.queue if task.kind != "export" and task.epoch < epochs]
        self.evaluated = min(self.evaluated, epochs)
        del self.history[epochs:]

    @property
    def ending(self) -> bool:
        """Whether the export is queued or done."""
        return self.exported or any(task.kind == "export" for task in self.queue)

    def release(self, worker: Worker) -> list[str]:
        """Release the tasks of this worker; returns the files that it has yet to send, which are lost."""
        if self.evaluator == worker:
            self.evaluator = None
        if self.caller == worker:
            self.caller = None
        for task in self.queue:
            if task.holder == worker:
                task.holder = None
        return self.files.release(worker)

    def dump(self) -> dict[str, Any]:
        """As JSON, without the holders, whose tokens end with this process."""
        return {
            "queue": [asdict(task) | {"holder": None} for task in self.queue],
            "history": list(self.history),
            "evaluated": self.evaluated,
            "learningRate": self.learning_rate,
            **self.files.dump(),
        }

    def rewound(self, saved: dict[str, Any]) -> dict[str, Any]:
        """What `dump` would return after a `load`: what is saved, with what was said of files since."""
        copy = replace(self)
        copy.load(saved)
        return copy.dump()

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        self.evaluator = self.caller = None
        self._complete = None
        self.queue = [Task(task["kind"], int(task["epoch"])) for task in saved["queue"]]
        self.history = [{str(k): float(v) for k, v in logs.items()} for logs in saved["history"]]
        self.evaluated = int(saved["evaluated"])
        self.files = self.files.rewound(saved, newest=len(self.complete()) - 1)
        rate = saved.get("learningRate")
        self.learning_rate = None if rate is None else float(rate)
