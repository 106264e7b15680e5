"""One line for each finished epoch, as in Keras' `fit`, from the status reports of a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_trainer.contract import Phase, StatusReport, TerminationMessage
from shoal_trainer.table import duration

PATIENCE = 10.0
"""A line waits this many seconds for the evaluation of its epoch."""


class EpochLines:
    """The lines of a job; each is returned once, when it is complete.

    A report does not say which epoch its metrics belong to. They are shown with an epoch if it is the only one that has
    ended since the previous evaluation, else on a line of their own.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._done = 0
        self._total: int | None = None
        self._unevaluated = 0
        self._metrics: set[tuple[tuple[str, float], ...]] = set()
        self._waiting: list[str] = []
        self._seconds = ""
        self._ended = 0.0

    @property
    def pending(self) -> str:
        """The line of the last epoch while its evaluation is awaited; else empty."""
        return "  ".join([*self._waiting, self._seconds] if self._seconds else self._waiting)

    def update(self, report: StatusReport, now: float) -> list[str]:
        """The lines that are complete since the last report; `now` in seconds."""
        if self._begun is None and report.phase is not Phase.STARTING:
            self._begun = now
        self._total = report.epochs_total
        return self._update(report.epoch, report.loss, report.metrics, now)

    def finish(self, message: TerminationMessage, now: float) -> list[str]:
        """The remaining lines."""
        return self._update(message.epoch, message.loss, message.metrics, now) + self._flush()

    def _update(self, epoch: int, loss: float | None, metrics: Mapping[str, float], now: float) -> list[str]:
        lines = []
        if epoch > self._done:  # it is less while a restarted coordinator has no data
            lines += self._flush()
            self._epoch_ended(epoch, loss, now)
        if metrics and (values := tuple(metrics.items())) not in self._metrics:
            self._metrics.add(values)
            lines += self._evaluated([f"{name} {value(each)}" for name, each in values])
        if now - self._ended > PATIENCE:
            lines += self._flush()
        return lines

    def _epoch_ended(self, epoch: int, loss: float | None, now: float) -> None:
        self._unevaluated += epoch - self._done
        self._waiting = [self._name(self._done + 1, epoch)]
        if loss is not None:
            self._waiting.append(f"loss {value(loss)}")
        if self._begun is not None:
            seconds = now - self._begun
            self._seconds = f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
        self._done, self._begun, self._ended = epoch, now, now

    def _evaluated(self, metrics: list[str]) -> list[str]:
        if self._unevaluated != 1:
            self._unevaluated = min(self._unevaluated, 1)  # the newest one may still be evaluated
            return [*self._flush(), "  ".join(["Evaluation", *metrics])]
        self._unevaluated = 0
        self._waiting = [*(self._waiting or [self._name(self._done, self._done)]), *metrics]
        return self._flush()

    def _name(self, first: int, last: int) -> str:
        total = f"/{self._total}" if self._total else ""
        return f"Epoch {last}{total}" if first == last else f"Epochs {first}-{last}{total}"

    def _flush(self) -> list[str]:
        lines = [self.pending] if self._waiting else []
        self._waiting, self._seconds = [], ""
        return lines


def value(number: float) -> str:
    """Format a loss or a metric as Keras does."""
    return f"{number:.4f}" if abs(number) > 1e-3 or not number else f"{number:.4e}"
