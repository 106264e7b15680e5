"""The contract with Keras' private names, and the equivalence of training, with the newest Keras of the registry."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TESTS = ("test_keras_internals.py", "test_keras_equivalence.py")
HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def install(requirement, folder):
    """Into a folder of its own, beside the packages of the lock; skips the test without a registry."""
    command = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps", "--target", str(folder)]
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    done = subprocess.run([*command, *options, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {requirement}: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_newest_keras_trains_as_before(tmp_path):
    install(os.environ.get("SHOAL_KERAS", "keras"), tmp_path)
    [installed] = tmp_path.glob("keras-*.dist-info")
    newest = installed.name.removeprefix("keras-").removesuffix(".dist-info")
    if newest == version("keras"):
        pytest.skip(f"the lock has the newest Keras, {newest}")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked = f"import keras; assert keras.__version__ == {newest!r}, keras.__version__"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "SHOAL_NIGHTLY": ""}
    subprocess.run([sys.executable, "-c", asked], env=environment, check=True)
    files = [str(HERE / test) for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "0", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"Keras {newest}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
