"""The epochs of a job, from the lines in which PS 0 logs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shoal_trainer.contract import EPOCH_LINE, EpochReport

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class History(Sequence[EpochReport]):
    """Epochs in order, from 0. `frame()` is a DataFrame where pandas is installed; `metric("loss")` is one column."""

    epochs: tuple[EpochReport, ...]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> History:
        """Read a log. An epoch that is logged again after a rollback replaces the first, and those after it."""
        found: dict[int, EpochReport] = {}
        for line in lines:
            _, marker, text = line.partition(EPOCH_LINE)
            if not marker:
                continue
            try:
                report = EpochReport.model_validate_json(text)
            except ValidationError:  # cut off
                continue
            found = {epoch: each for epoch, each in found.items() if epoch < report.epoch}
            found[report.epoch] = report
        return cls(tuple(found[epoch] for epoch in sorted(found)))

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int or slice, as for any sequence
        return self.epochs[index]

    @property
    def names(self) -> list[str]:
        """The metrics, in the order in which they first appear."""
        return list(dict.fromkeys(name for each in self.epochs for name in each.metrics))

    def metric(self, name: str) -> list[float | None]:
        """One metric in each epoch; None where it is missing."""
        return [each.metrics.get(name) for each in self.epochs]

    def rows(self) -> list[dict[str, float | int | None]]:
        """A dict for each epoch: `epoch` and all metrics."""
        return [
            {"epoch": each.epoch, **{name: each.metrics.get(name) for name in self.names}}
            for each in self.epochs
        ]

    def frame(self) -> pd.DataFrame:
        """As a DataFrame with the epoch as index. Needs pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["epoch", *self.names]).set_index("epoch")
