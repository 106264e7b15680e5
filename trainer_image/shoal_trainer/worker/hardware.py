"""Detects the accelerator and the CPU limit, and selects the batch size and the number of threads.

A worker may be scheduled to nodes with different accelerators, so it detects its own with TensorFlow and selects the
batch size that the job configures for it.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from shoal_trainer.contract import RuntimeConfig

NO_ACCELERATOR = "CPU"
THREADS_ENV = "TF_NUM_INTRAOP_THREADS"
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores(limit: Path = CPU_MAX) -> int:
    """The number of cores that this process may use, including the container's limit (cgroup v2).

    TensorFlow starts a thread per core of the node; with more threads than the limit, the kernel throttles them all.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return min(available, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return available


def shared_by(processes: int) -> dict[str, str]:
    """The environment that divides the cores among N processes, unless TensorFlow's threads are already set."""
    return {THREADS_ENV: os.environ.get(THREADS_ENV, str(max(1, cores() // max(1, processes))))}


def device_name() -> str:
    """The first accelerator as TensorFlow names it ("Tesla T4"), or "CPU"."""
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(device).get("device_name", "GPU"))
    return NO_ACCELERATOR


def fitted(config: RuntimeConfig, device: str) -> RuntimeConfig:
    """The configuration with the `batch_size` of the first accelerator whose words are all in the device's name."""
    words = _words(device)
    size = next(
        (entry.batch_size for entry in config.batch_sizes if _words(entry.accelerator) <= words), None
    )
    if size is None:
        return config
    reference = config.reference_batch_size or config.batch_size
    return config.model_copy(update={"batch_size": size, "reference_batch_size": reference})


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
