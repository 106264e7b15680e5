"""Trains the example for a moment. Prints its samples in a second of processor time, and those of an epoch."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

BATCH, FIRST, STEPS = 32, 20, 200
"""Samples of a step; steps that trace and warm up; steps that count."""


def main() -> None:
    """Print both numbers."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    digits: Any = import_module("digits")
    model, x, y = digits.build(), digits.x, digits.y

    def train(steps: int) -> None:
        for step in range(steps):
            at = step * BATCH % (len(x) - BATCH)
            model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])

    train(FIRST)
    begin = time.process_time()
    train(STEPS)
    print(STEPS * BATCH / (time.process_time() - begin), len(x))


if __name__ == "__main__":
    main()
