"""The loss and the metrics of each epoch of training: means over its samples, as in the logs of Keras.

Callbacks decide by them, so they are rounded where people read them, not here.

Pushes whose losses are unknown (local steps in an outage, those after the last snapshot when parameter server 0 is
lost) are missing in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from shoal_trainer.wire.messages import LOSS, MetricSum, PushMeta


class EpochMeans:
    """Sums by epoch and name, until the epoch ends."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, list[float]]] = {}
        """[sum of values, sum of weights] of each metric."""

    def pushed(self, meta: PushMeta) -> None:
        """Add an applied push, to each of the epochs that it covers what is of its samples."""
        epochs = dict.fromkeys(mark.epoch for mark in meta.progress)
        kept = meta.samples - meta.left_out
        loss = MetricSum(LOSS, meta.loss * kept, float(kept))
        apart = _of_epochs(meta.metrics) if len(epochs) > 1 else []
        for epoch, metrics in zip(epochs, apart or [[*meta.metrics, loss]], strict=False):
            self._add(self._sums.setdefault(epoch, {}), metrics)

    def _add(self, sums: dict[str, list[float]], metrics: Iterable[MetricSum]) -> None:
        for name, total, weight in metrics:
            before = sums.get(name, [0.0, 0.0])
            if math.isfinite(after := before[0] + total):
                sums[name] = [after, before[1] + weight]

    def current(self) -> dict[str, float]:
        """The means so far of the newest epoch."""
        return _means(self._sums[max(self._sums)]) if self._sums else {}

    def end(self, epoch: int, loss: float | None) -> dict[str, float]:
        """The means of an epoch, which is then forgotten, as are those before it. `loss`: if none is known of it."""
        means = ({} if loss is None else {"loss": loss}) | _means(self._sums.get(epoch, {}))
        self._sums = {later: sums for later, sums in self._sums.items() if later > epoch}
        return means

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        return {
            str(epoch): {name: list(pair) for name, pair in sums.items()}
            for epoch, sums in self._sums.items()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `dump`."""
        self._sums = {
            int(epoch): {str(name): [float(total), float(weight)] for name, (total, weight) in sums.items()}
            for epoch, sums in saved.items()
        }


def _of_epochs(metrics: Iterable[MetricSum]) -> list[list[MetricSum]]:
    """See `PushMeta`; [] from an earlier worker, which tells no epochs apart."""
    found: list[list[MetricSum]] = []
    for metric in metrics:
        if metric.name == LOSS:
            found.append([])
        if found:
            found[-1].append(metric)
    return found


def _means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    means = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}
