"""Detects the accelerator and the CPU limit, and selects the batch size and the number of threads.

A worker may be scheduled to nodes with different accelerators, so it detects its own with TensorFlow and selects the
batch size that the job configures for it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal_trainer import cgroup
from shoal_trainer.contract import ACCELERATORS_ENV, RuntimeConfig
from shoal_trainer.coordinator.protocol import Equipment
from shoal_trainer.errors import NoAccelerator

log = logging.getLogger(__name__)

NO_ACCELERATOR = "CPU"
THREADS_ENV = "TF_NUM_INTRAOP_THREADS"
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
GROWTH_ENV = "TF_FORCE_GPU_ALLOW_GROWTH"


def cores(node: float = 0.0, root: Path = cgroup.ROOT) -> float:
    """The CPU time that this process may use, in cores: half a core is 0.5.

    Args:
        node: cores of the node, if its pool says so (0: it does not). A limit of the whole node is not visible here.
        root: of the container's cgroup.

    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [limit for limit in (node, cgroup.cpu_limit(root)) if limit]
    return round(min([float(available), *limits]), 3)


def shared_by(processes: int, node: float = 0.0) -> dict[str, str]:
    """The environment that divides the cores among N processes, unless TensorFlow's threads are already set.

    TensorFlow starts a thread per core of the node; with more threads than the limit, the kernel throttles them all.
    """
    threads = max(1, math.ceil(cores(node)) // max(1, processes))
    return {THREADS_ENV: os.environ.get(THREADS_ENV, str(threads))}


def accelerators_of(
    index: int, workers: int, devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables with which the GPUs of this machine are divided among its `workers`, whose memory grows by need.

    Each has the same number of GPUs as the others, or one more. With more workers than GPUs, several share a card.
    """
    present = sorted((path.name[6:] for path in devices.glob("nvidia[0-9]*")), key=int)
    chosen = environment.get(VISIBLE_ENV)
    gpus = present if chosen is None else [name for name in chosen.split(",") if name]
    if not gpus:
        return {}
    own = gpus[index::workers] or [gpus[index % len(gpus)]]
    return {VISIBLE_ENV: ",".join(own), GROWTH_ENV: environment.get(GROWTH_ENV, "true")}


CATALOGUE: tuple[tuple[str, str], ...] = (
    ("A100-80GB", "a100 80gb"), ("A100-40GB", "a100"), ("V100-32GB", "v100 32gb"), ("V100-16GB", "v100"),
    ("H100-80GB", "h100"), ("H200-141GB", "h200"), ("GB200", "gb200"), ("B200", "b200"), ("B300", "b300"),
    ("RTX-PRO-6000-Blackwell-SE", "rtx pro 6000"), ("L40S", "l40s"), ("L4", "l4"), ("A10G", "a10g"), ("T4", "t4"),
    ("P100", "p100"), ("P4", "p4"), ("M60", "m60"), ("K80", "k80"),
)  # fmt: skip
"""The names of accelerators in the operator's catalogue, and the words of the names that drivers give them: the first
entry whose words are all in a device's name is its name. A test compares this with the catalogue."""


def catalogue_name(device: str) -> str:
    """The name by which the operator knows a device: "T4" for "Tesla T4"; one that it does not know keeps its own.

    A part of a card is another device: "A100-40GB-MIG-1g-5gb".
    """
    card, _, part = device.partition(" MIG ")
    words = _words(card)
    known = (name for name, wanted in CATALOGUE if _words(wanted) <= words)
    own = "-".join(re.findall(r"[A-Za-z0-9]+", re.sub(r"(?i)^(nvidia|tesla)\b", "", card.strip())))
    profile = "-".join(["", "MIG", *re.findall(r"[a-z0-9]+", part)]) if part else ""
    return next(known, own[: 63 - len(profile)] or "GPU") + profile


def equipment(device: str, devices: int, tensors: int, node: float = 0.0, precision: str = "") -> Equipment:
    """What this worker computes with.

    Args:
        device: from `device_name`.
        devices: how many of them share its batches.
        tensors: of its model.
        node: see `cores`.
        precision: of its model.

    """
    return Equipment(catalogue_name(device), device[:256], min(64, devices), cores(node), tensors, precision)


def accelerators() -> tuple[str, ...]:
    """TensorFlow's names of the accelerators that it sees."""
    import tensorflow as tf

    return tuple(device.name for device in tf.config.list_logical_devices("GPU"))


def device_name() -> str:
    """The first accelerator as TensorFlow names it ("Tesla T4"), or "CPU"."""
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(device).get("device_name", "GPU"))
    return NO_ACCELERATOR


def require_accelerators(promised: int, loader: Callable[[str], object] = ctypes.CDLL) -> None:
    """Raise `NoAccelerator` if the pod was promised accelerators and TensorFlow sees fewer.

    A worker without its GPU would train slowly, hold leases, and look healthy. Another node may have one.
    """
    import tensorflow as tf

    seen = len(tf.config.list_physical_devices("GPU"))
    if seen >= promised:
        return
    reason = "TensorFlow could not use the driver or a CUDA library; see the log of the worker"
    try:
        loader("libcuda.so.1")
    except OSError as error:
        reason = f"the driver is missing: {error}"
    raise NoAccelerator(
        f"The pod has {promised} GPU{'s' * (promised > 1)} in its limits, but TensorFlow sees {seen or 'none'}: "
        f"{reason}. "
        "Use the image worker-gpu, and a driver that its CUDA version supports."
    )


def promised_accelerators() -> int:
    """The GPUs in the limits of this pod's container, as the operator tells; 0 without the operator."""
    return int(os.environ.get(ACCELERATORS_ENV) or 0)


def fitted(config: RuntimeConfig, device: str) -> RuntimeConfig:
    """The configuration with the `batch_size` of the first accelerator whose words are all in the device's names.

    Its names are the driver's and the catalogue's. That of a card is not for a part of it (MIG), whose profile an entry
    must have.
    """
    name = catalogue_name(device)
    words, profile = _words(device) | _words(name), _words(device.partition(" MIG ")[2])
    for entry in config.batch_sizes:
        if profile <= _words(entry.accelerator) <= words:
            reference = config.reference_batch_size or config.batch_size
            return config.model_copy(
                update={"batch_size": entry.batch_size, "reference_batch_size": reference}
            )
    if config.batch_sizes:
        log.info(
            "none of batchSizes (%s) matches %s (%s): batches of %d",
            ", ".join(entry.accelerator for entry in config.batch_sizes), device, name, config.batch_size,
        )  # fmt: skip
    return config


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
