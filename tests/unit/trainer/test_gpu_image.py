"""The image for GPUs, whose gigabytes of CUDA no test builds: what its Dockerfile says of the driver."""

from __future__ import annotations

import re
from pathlib import Path

DOCKERFILE = Path(__file__).parents[3] / "trainer_image" / "Dockerfile"


def test_image_for_gpus_finds_the_driver_of_each_platform() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    (stage,) = (each for each in stages if each.split()[2:3] == ["worker-gpu-dependencies"])
    lines = re.findall(r"^ENV ((?:.*\\\n)*.*)", stage, flags=re.MULTILINE)
    variables = dict(word.split("=") for word in " ".join(lines).replace("\\\n", "").split())
    assert variables == {
        "KERAS_BACKEND": "tensorflow",
        # Warnings tell why a driver or a library of CUDA could not be used.
        "TF_CPP_MIN_LOG_LEVEL": "1",
        # Where GKE's device plugin mounts the driver and nvidia-smi.
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
        "PATH": "$PATH:/usr/local/nvidia/bin",
        # Without these two NVIDIA's container toolkit mounts no driver, or less of it than CUDA needs.
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    (image,) = (each for each in stages if each.split()[2:3] == ["worker-gpu"])
    assert image.startswith("worker-gpu-dependencies ")
    assert "ENV" not in image
