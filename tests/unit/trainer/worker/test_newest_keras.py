"""With the newest Keras of the registry: the contract with its private names, and the equivalence of training.

And with the newest KerasHub, which the lock has not: a causal language model is tuned.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.unit.trainer.installed import environment, install

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
HUB = ["keras-hub", "kagglehub", "kagglesdk", "regex", "requests", "sentencepiece", "tokenizers", "tqdm"]
"""And what it imports that the lock has not. Its dependencies would be as many as Shoal's own."""


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
