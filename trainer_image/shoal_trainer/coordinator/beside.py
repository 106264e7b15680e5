"""What passes beside training steps, in the samples that would have been trained meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_trainer.contract import BesideSums


@dataclass
class Beside:
    """Cumulative sums of a process, see `BesideSums`."""

    epochs: int = 0
    others: int = 0
    tasks: float = 0.0
    waits: float = 0.0

    def passed(self, rate: float, tasks: float, waits: float) -> None:
        """A worker of this `rate` (samples/s) spent seconds in tasks and without work."""
        self.tasks += rate * tasks
        self.waits += rate * waits

    def epoch_ended(self, workers: int) -> None:
        """An epoch that is not the last one has ended, with so many workers."""
        self.epochs += 1
        self.others += max(workers - 1, 0)

    def report(self) -> BesideSums:
        """The sums."""
        return BesideSums(epochs=self.epochs, others=self.others, tasks=self.tasks, waits=self.waits)
