"""What a worker runs on, and the batch size and threads that go with it.

Spot workers land where there is room, so nobody knows the accelerator before the pod has started. The worker asks
TensorFlow, and takes the batch size that the job gives for what it finds.
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
    """How many cores this process may use: its container's limit counts (cgroup v2), not only the machine.

    TensorFlow starts a thread for each core of the node; where the container may use fewer, the kernel stops them all
    for a part of each period.
    """
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return min(mine, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no limit
        return mine


def shared_by(processes: int) -> dict[str, str]:
    """The environment of each of so many processes that compute on this machine: TensorFlow's threads, or yours."""
    return {THREADS_ENV: os.environ.get(THREADS_ENV, str(max(1, cores() // processes)))}


def device_name() -> str:
    """The first accelerator as TensorFlow names it ("Tesla T4"), or "CPU"."""
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(device).get("device_name", "GPU"))
    return NO_ACCELERATOR


def fitted(config: RuntimeConfig, device: str) -> RuntimeConfig:
    """The configuration on this device: `batch_size` is that of the first entry whose words are all in its name."""
    words = _words(device)
    size = next((of.batch_size for of in config.batch_sizes if _words(of.accelerator) <= words), None)
    if size is None:
        return config
    reference = config.reference_batch_size or config.batch_size
    return config.model_copy(update={"batch_size": size, "reference_batch_size": reference})


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
