"""Join: from the start of a worker's process to its first accepted push, against TensorFlow's own import and trace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.harness import Measurement, summary
from benchmarks.runs import run

SCRIPT = """
import time; start = time.perf_counter()
from benchmarks.jobs import compute
from benchmarks import models
import numpy as np, tensorflow as tf
model = compute("resnet20").model()
x, y = np.zeros((16, 32, 32, 3), "float32"), np.zeros(16, "int32")
model.train_on_batch(x, y)
"""


def measure(quick: bool) -> Iterator[Measurement]:
    """Plain Keras' import, build and first step in a process of its own; then a worker of ours."""
    ratios, seconds = [], []
    for _ in range(1 if quick else 3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True)
        plain = time.perf_counter() - start
        found = run("benchmarks.jobs:compute", workers=1, args={"model": "resnet20"}, batch=16, seconds=2.0)
        seconds.append(found.first_push_seconds[0])
        ratios.append(found.first_push_seconds[0] / plain)
    yield summary("process start to first accepted push, ResNet-20", seconds, "s", "")
    yield summary("the same", ratios, "x", "Keras' own import, build, first step", 1.1, at_most=True)
