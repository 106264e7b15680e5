"""Join: from the start of a worker's process to its first accepted push, against TensorFlow's own import and trace."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.harness import Measurement, summary
from benchmarks.runs import JoinParts, run

SCRIPT = """
import time
from benchmarks.jobs import compute
from benchmarks import models
import numpy as np, tensorflow as tf
model = compute("resnet20").model()
x, y = np.zeros((16, 32, 32, 3), "float32"), np.zeros(16, "int32")
model.train_on_batch(x, y)
print(time.time())
"""


def measure(quick: bool) -> Iterator[Measurement]:
    """Import, build and first step of plain Keras in a separate process; then a Shoal worker, and its parts."""
    plain: list[float] = []
    joined: list[float] = []
    parts: list[JoinParts] = []
    for _ in range(1 if quick else 3):
        start = time.time()
        done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
        plain.append(float(done.stdout.splitlines()[-1]) - start)
        [found] = run("benchmarks.jobs:compute", workers=1, args={"model": "resnet20"}, batch=16, seconds=2.0)
        joined.append(found.first_push_seconds[0])
        parts.append(found.join_parts[0])
    against = "Keras' own import, build, first step"
    ratios = [ours / keras for ours, keras in zip(joined, plain, strict=True)]
    yield summary("process start to first accepted push, ResNet-20", ratios, "x", against, 1.1, at_most=True)
    base = statistics.median(plain)
    columns = zip(("imports", "build and trace", "hello", "pull"), zip(*parts, strict=True), strict=True)
    for name, spent in columns:
        yield summary(f"of it: {name}", [seconds / base for seconds in spent], "x", against)
    rest = [(ours - sum(part)) / base for ours, part in zip(joined, parts, strict=True)]
    yield summary("of it: the rest (interpreter, first step and push)", rest, "x", against)
