"""A built worker image finds the driver where GKE's device plugin mounts it.

The driver is a stub: any library under its name. The environment is that of `worker-gpu`, whose gigabytes of CUDA are
not built here; code, Python and dynamic loader are those of `worker`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from dev.images import IMAGES, build, buildah
from dev.paths import ROOT
from dev.tools import ensure

pytestmark = pytest.mark.nightly  # a minute, most of it the copy of an image

PYTHON = "/opt/shoal/bin/python"
WORK = """
from shoal_trainer.errors import NoAccelerator
from shoal_trainer.worker.hardware import require_accelerators
try:
    require_accelerators(1)
except NoAccelerator as error:
    print(error)
"""
MOUNT = """
import _ctypes, os, shutil
os.makedirs("/usr/local/nvidia/lib64")
shutil.copy(_ctypes.__file__, "/usr/local/nvidia/lib64/libcuda.so.1")
"""


def run(*words: str) -> str:
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    done = subprocess.run(buildah(*words), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def library_path() -> str:
    """LD_LIBRARY_PATH of the image worker-gpu."""
    text = (ROOT / "trainer_image" / "Dockerfile").read_text()
    stage = text.split("AS worker-gpu-dependencies")[1].split("\nFROM ")[0]
    (found,) = re.findall(r"LD_LIBRARY_PATH=(\S+)", stage)
    return str(found)


@pytest.fixture
def container() -> Iterator[str]:
    build(["digits"], ensure())  # and its base, the worker
    name = run("from", "--pull-never", IMAGES["worker"].reference)
    yield name
    run("rm", name)


def test_driver_of_the_device_plugin_is_found(container: str) -> None:
    def python(code: str) -> str:
        path = f"LD_LIBRARY_PATH={library_path()}"
        return run("run", "--user", "0", "--env", path, container, "--", PYTHON, "-c", code)

    assert "the driver is missing: libcuda.so.1" in python(WORK)
    python(MOUNT)
    told = python(WORK)
    assert "TensorFlow could not use the driver or a CUDA library" in told
    assert "TensorFlow sees none" in told
