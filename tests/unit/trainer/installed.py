"""Packages that the lock has not, in a folder of its own beside those of the lock."""

import os
import subprocess
import sys

import pytest


def install(requirements, folder):
    """Into this folder, without their dependencies; skips the test, with the reason, where it cannot be done."""
    command = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps", "--target", str(folder)]
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    done = subprocess.run([*command, *options, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {requirements}: {done.stderr.strip().splitlines()[-1]}")


def environment(folder, **more):
    """Of a process that imports from the folder first."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": path, **more}
