"""What the rules for stale gradients cost a server: a push of a shard in this process, with and without them.

`python -m benchmarks.rule_costs [--sizes …]` prints the table of docs/benchmarks/kernels.md. Without sockets: all that
a server does for a push but to receive it and to send the answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import conditions
from benchmarks.kernels import ENCODINGS
from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta

SIZES = (9_000, 1_730_000, 25_600_000)
WORKERS, AHEAD = 8, 7.0
"""In rounds a gradient of one of eight meets 3.5 others, and its answer looks twice as far ahead."""
OPTIMIZERS = {
    "momentum": OptimizerConfig(momentum=0.9, batch_size=1),
    "Adam": OptimizerConfig(name="adam", batch_size=1),
}
SECONDS, LEAST = 0.5, 24
"""Of each way to push, and how many pushes at least."""


class Pusher:
    """A shard to which `WORKERS` push the same gradient in turn."""

    def __init__(self, config: OptimizerConfig, size: int, encoding: str) -> None:
        self._shard = ShardStore(0, 1, 0)
        self._shard.hello(0, 0, ModelSpec(fingerprint="0" * 64, parameters=size, optimizer=config))
        first = aligned(size)
        first += 0.1
        self._shard.offer(0, 0, first)
        self._shard.workers.set_live(WORKERS)
        dtype = ENCODINGS[encoding]
        self._gradient, self._io = aligned(size, dtype), aligned(size, dtype)
        kernels.encode(first, self._gradient)
        self._pushed = 0

    def seconds(self, ahead: float, *, agree: bool) -> float:
        """How long the next push takes. `agree`: whether it is looked at how far gradients agree."""
        shard, model = self._shard, self._shard.model
        assert model is not None
        np.copyto(self._io, self._gradient)
        seq, slot = divmod(self._pushed, WORKERS)
        self._pushed += 1
        kept: Any = vars(model).copy()
        if not agree:
            model.__dict__ |= {"meet": lambda *_: np.zeros(3), "agreement": lambda: 0.0}
        base = max(0, shard.history.version - WORKERS // 2)
        began = time.process_time()
        shard.run(shard.pushing(slot, 0, seq + 1, base, PushMeta(1, length=1.0), ahead=ahead), self._io)
        took = time.process_time() - began
        for name in model.__dict__.keys() - kept.keys():
            del model.__dict__[name]
        return took


def rows(sizes: tuple[int, ...]) -> Iterator[str]:
    """Lines of the table."""
    for name, config in OPTIMIZERS.items():
        for size in sizes:
            for encoding in ENCODINGS:
                pusher = Pusher(config, size, encoding)
                ways: list[Callable[[], float]] = [
                    partial(pusher.seconds, 0.0, agree=False),
                    partial(pusher.seconds, AHEAD, agree=False),
                    partial(pusher.seconds, AHEAD, agree=True),
                ]
                for way in ways:
                    way()
                taken: list[list[float]] = [[] for _ in ways]
                while sum(taken[0]) < SECONDS or len(taken[0]) < LEAST:
                    for way, times in zip(ways, taken, strict=True):
                        times.append(way())
                plain, ahead, both = map(min, taken)
                cells = (
                    f"{plain * 1e3:.3g} ms | {ahead / plain:.2f} | {both / ahead:.2f} | {both / plain:.2f}"
                )
                yield f"| {name}, {size:,}, {encoding} | {cells} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.rule_costs", description=__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    options = parser.parse_args()
    print(conditions("python -m benchmarks.rule_costs"))
    print("| | without both | look-ahead | agreement | both |\n|---|---|---|---|---|")
    for row in rows(tuple(options.sizes)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
