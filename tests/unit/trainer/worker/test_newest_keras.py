"""With the newest Keras of the registry: the contract with its private names, and the equivalence of training.

And with the newest KerasHub, which the lock has not: a causal language model is tuned.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
HUB = ["keras-hub", "kagglehub", "kagglesdk", "regex", "requests", "sentencepiece", "tokenizers", "tqdm"]
"""And what it imports that the lock has not. Its dependencies would be as many as Shoal's own."""


def install(requirements, folder):
    """Into a folder of its own, beside the packages of the lock; skips the test without a registry."""
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


def run(within, *tests):
    """Run these files of tests; return what pytest says of them."""
    files = [str(HERE / test) for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "0", *files]
    done = subprocess.run(command, cwd=ROOT, env=within, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.nightly
def test_newest_keras_trains_as_before(tmp_path):
    install([os.environ.get("SHOAL_KERAS", "keras")], tmp_path)
    [installed] = tmp_path.glob("keras-*.dist-info")
    newest = installed.name.removeprefix("keras-").removesuffix(".dist-info")
    if newest == version("keras"):
        pytest.skip(f"the lock has the newest Keras, {newest}")
    asked = f"import keras; assert keras.__version__ == {newest!r}, keras.__version__"
    subprocess.run([sys.executable, "-c", asked], env=environment(tmp_path), check=True)
    run(environment(tmp_path, SHOAL_NIGHTLY="1"), "test_keras_internals.py", "test_keras_equivalence.py")


@pytest.mark.nightly
def test_newest_keras_hub_is_tuned(tmp_path):
    install(HUB, tmp_path)
    told = run(environment(tmp_path, SHOAL_NIGHTLY="1"), "test_keras_hub.py")
    assert "2 passed" in told
    assert "skipped" not in told
