"""How few on-demand workers keep a deadline: the rule of the simulator.

With `spot` = 0 it is the safety rule: the remaining work could still be done if all spot workers were lost now. With a
lower quantile of what spot will do, it keeps the deadline with that confidence, at less cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_on_demand"]

Floats = NDArray[np.float64]


def least_on_demand(
    remaining: Any,
    *,
    rate: float,
    there: Any,
    left: float,
    startup: float,
    most: int,
    workers: int,
    waiting: Any = 0.0,
    spot: Any = 0.0,
) -> NDArray[np.int64]:
    """The least number of on-demand workers, from now to the deadline, that does the remaining work; at most `most`.

    Scalars, or arrays over runs (r,).

    Args:
        remaining: steps.
        rate: steps/s of one worker.
        there: on-demand workers that work or start.
        left: seconds to the deadline.
        startup: seconds until a new on-demand worker works (take a high quantile of it).
        most: the most on-demand workers.
        workers: the most workers in all: spot makes room for on-demand.
        waiting: worker-seconds until those that start will work.
        spot: mean spot workers at work until the deadline that are counted on; 0: none.

    """
    number = np.arange(most + 1.0)
    have, low = np.asarray(there, dtype=np.float64)[..., None], np.asarray(spot, dtype=np.float64)[..., None]
    steady = (
        number * left - np.maximum(number - have, 0.0) * min(startup, left) - np.asarray(waiting)[..., None]
    )
    done = rate * (steady + np.minimum(low, workers - number) * left)
    enough = done >= np.asarray(remaining, dtype=np.float64)[..., None]
    return np.asarray(np.where(enough.any(axis=-1), enough.argmax(axis=-1), most), dtype=np.int64)
