"""What a worker runs on, and the batch size that goes with it.

Spot workers land where there is room, so nobody knows the accelerator before the pod has started. The worker asks
TensorFlow, and takes the batch size that the job gives for what it finds.
"""

from __future__ import annotations

import re

from shoal_trainer.contract import RuntimeConfig

NO_ACCELERATOR = "CPU"


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
