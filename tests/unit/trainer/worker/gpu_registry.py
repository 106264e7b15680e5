"""The GPU kernels of the worker-gpu image's TensorFlow. Its wheel registers them on a machine without a GPU, too."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dev.paths import ROOT, cache

LOCK = ROOT / "lock" / "worker-gpu.txt"
DUMP = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tensorflow.python.framework import kernels
found = {}
for kernel in kernels.get_all_registered_kernels().kernel:
    if kernel.device_type in ("GPU", "DEFAULT"):
        allowed = {c.name: list(c.allowed_values.list.type) for c in kernel.constraint}
        found.setdefault(kernel.op, []).append(allowed)
print(json.dumps(found))
"""


class Missing(Exception):
    """The wheel cannot be had."""


def gpu_kernels() -> dict[str, list[dict[str, list[int]]]]:
    """Of each op with a GPU kernel: what types of its attributes each kernel allows. `Missing` without the wheel."""
    found = re.search(r"^tensorflow==.*?(?=^\S)", LOCK.read_text() + "\n.", re.MULTILINE | re.DOTALL)
    assert found is not None
    requirement = re.sub(r"^ +#.*\n", "", found[0], flags=re.MULTILINE)
    kept = cache() / f"gpu-kernels-{hashlib.sha256(requirement.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(_dumped(requirement))
    kernels: dict[str, list[dict[str, list[int]]]] = json.loads(kept.read_text())
    return kernels


def _dumped(requirement: str) -> str:
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-wheel-", dir=cache()) as name:
        folder = Path(name)
        (folder / "lock.txt").write_text(requirement)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run(
            [*pip, "-r", "lock.txt", "-d", "."], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Missing(f"the wheel of lock/worker-gpu.txt: {done.stderr.strip()[-500:]}")
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, folder / "package"], check=True)
        dump = subprocess.run(
            [sys.executable, "-c", DUMP, folder / "package"], capture_output=True, text=True, check=True
        )
        return dump.stdout
