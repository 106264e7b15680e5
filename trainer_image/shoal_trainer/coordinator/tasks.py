"""What is asked of a worker once: evaluate a pass, run the callbacks of a pass, export the model. Pure.

A task is leased, given to another worker when its holder is lost, and done when its result is there. They come in
order: callbacks see the metrics of their pass, the export comes last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["evaluate", "callbacks", "export"]


@dataclass
class Task:
    """One task. `holder`: (slot, incarnation) and the token under which it was given."""

    kind: Kind
    epoch: int
    holder: tuple[int, int] | None = None
    token: tuple[int, int] = (0, 0)


@dataclass
class Tasks:
    """The queue, and what the evaluations found: one entry of `history` for each pass, as Keras' logs."""

    queue: list[Task] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    evaluated: int = 0
    """Passes whose tasks were queued."""
    exported: bool = False

    def pass_ended(self, epoch: int, logs: dict[str, float], *, validation: bool, callbacks: bool) -> None:
        """A pass is complete: its training metrics are known, and its tasks are due."""
        while len(self.history) <= epoch:
            self.history.append({})
        self.history[epoch].update(logs)
        self.evaluated = epoch + 1
        if any(task.kind == "export" for task in self.queue):  # a late push completed an epoch after the stop
            return
        # An evaluation that nobody has begun is made void by the next one: the parameters have moved on.
        if not callbacks:
            self.queue = [t for t in self.queue if t.holder is not None or t.kind != "evaluate"]
        if validation:
            self.queue.append(Task("evaluate", epoch))
        if callbacks:
            self.queue.append(Task("callbacks", epoch))

    def export(self, epoch: int) -> None:
        """The last task."""
        if not self.exported and not any(task.kind == "export" for task in self.queue):
            self.queue.append(Task("export", epoch))

    @property
    def behind(self) -> bool:
        """Whether tasks of more than one pass are waiting or under way."""
        return len({task.epoch for task in self.queue}) > 1

    def grant(self, slot: int, incarnation: int, token: tuple[int, int]) -> Task | None:
        """The first task, unless it is in somebody's hands."""
        if not self.queue or self.queue[0].holder is not None:
            return None
        task = self.queue[0]
        task.holder, task.token = (slot, incarnation), token
        return task

    def held(self, slot: int, incarnation: int, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token."""
        task = self.queue[0] if self.queue else None
        mine = task is not None and task.holder == (slot, incarnation) and task.token == token
        return task if mine else None

    def done(self, token: tuple[int, int], metrics: dict[str, float]) -> Task | None:
        """A result came; None where the task is somebody else's by now."""
        if not self.queue or self.queue[0].holder is None or self.queue[0].token != token:
            return None
        task = self.queue.pop(0)
        while len(self.history) <= task.epoch:
            self.history.append({})
        self.history[task.epoch].update(metrics)
        self.exported = self.exported or task.kind == "export"
        return task

    def release(self, slot: int, incarnation: int) -> None:
        """Its holder is gone."""
        for task in self.queue:
            if task.holder == (slot, incarnation):
                task.holder = None

    def dump(self) -> dict[str, Any]:
        """As JSON; who holds what is not kept, for a token ends with parameter server 0."""
        return {
            "queue": [asdict(task) | {"holder": None} for task in self.queue],
            "history": [dict(logs) for logs in self.history],
            "evaluated": self.evaluated,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        self.queue = [Task(task["kind"], int(task["epoch"])) for task in saved["queue"]]
        self.history = [{str(k): float(v) for k, v in logs.items()} for logs in saved["history"]]
        self.evaluated = int(saved["evaluated"])
