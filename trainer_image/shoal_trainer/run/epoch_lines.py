"""One line for each finished epoch, as in Keras' `fit`, from the status reports of a job. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from shoal_trainer.contract import EpochReport, Phase, StatusReport, TerminationMessage
from shoal_trainer.run.table import duration, metric


class EpochLines:
    """The lines of a job; each is returned once, in order, when its epoch is complete."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._total: int | None = None
        self._finished = 0
        """Epochs that have a duration."""
        self._waiting: dict[int, EpochReport] = {}
        self._seconds: dict[int, float] = {}

    @property
    def pending(self) -> list[str]:
        """The lines of epochs whose evaluation is awaited."""
        return [self._line(each) for _, each in sorted(self._waiting.items())]

    def update(self, report: StatusReport, now: float) -> list[str]:
        """The lines that are complete since the last report; `now` in seconds."""
        if self._begun is None and report.phase is not Phase.STARTING:
            self._begun = now
        self._total = report.epochs_total
        for each in report.epochs:
            if each.epoch in self._waiting or each.epoch >= self._finished:
                self._waiting[each.epoch] = each
        self._measure(now)
        return self._take(takewhile(lambda epoch: self._waiting[epoch].complete, sorted(self._waiting)))

    def finish(self, message: TerminationMessage, now: float) -> list[str]:
        """The remaining lines."""
        last = max(self._waiting, default=message.epoch - 1)
        if last in self._waiting or last >= self._finished:
            known = self._waiting.get(last, EpochReport(epoch=last))
            loss = {} if message.loss is None else {"loss": message.loss}
            self._waiting[last] = known.model_copy(update={"metrics": loss | known.metrics | message.metrics})
        self._measure(now)
        return self._take(sorted(self._waiting))

    def _measure(self, now: float) -> None:
        """Set the duration of an epoch that has just ended; several between two reports have none."""
        new = [epoch for epoch in self._waiting if epoch >= self._finished]
        if not new:
            return
        if len(new) == 1 and new[0] == self._finished and self._begun is not None:
            self._seconds[new[0]] = now - self._begun
        self._finished, self._begun = max(new) + 1, now

    def _take(self, epochs: Iterable[int]) -> list[str]:
        return [self._line(self._waiting.pop(epoch)) for epoch in list(epochs)]

    def _line(self, each: EpochReport) -> str:
        total = f"/{self._total}" if self._total else ""
        parts = [
            f"Epoch {each.epoch + 1}{total}",
            *(f"{name} {metric(v)}" for name, v in each.metrics.items()),
        ]
        seconds = self._seconds.get(each.epoch)
        if seconds is not None:
            parts.append(f"{seconds:.1f} s" if seconds < 60 else duration(seconds))
        return "  ".join(parts)
