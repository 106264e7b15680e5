"""The forms of `test_forms.py` that it imitates, from the packages themselves: Hugging Face `datasets`, and Grain."""

import subprocess
import sys

import pytest

from tests.unit.trainer.installed import environment, install

READ = """
import numpy as np
from shoal_trainer import Indexed, Training
from shoal_trainer.data.source import Part

X, Y = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 3

def read(data):
    source = Training(model=lambda: None, data=data).data
    assert source.describe().size == 40
    orders = []
    for epoch in range(2):
        seen = []
        for start, stop in ((0, 17), (17, 40)):
            for batch in source.read(Part(start, stop, epoch), 7):
                x, y = batch.as_given()
                assert np.array_equal(np.ravel(x) % 3, np.ravel(y))
                seen += np.ravel(x).astype(int).tolist()
        assert sorted(seen) == list(range(40))
        orders.append(seen)
    assert orders[0] != orders[1]
"""
HUGGING_FACE = """
import datasets
rows = datasets.Dataset.from_dict({"value": X.tolist(), "label": Y.tolist()})
for table in (rows, rows.with_format("numpy"), rows.shuffle(seed=1), rows.map(lambda row: {"value": row["value"]})):
    read(Indexed.from_items(table, lambda row: (row["value"], row["label"])))
batch = Training(model=lambda: None, data=rows).data.example(4)
assert np.shape(batch.x["value"]) == (4, 1)
try:
    Training(model=lambda: None, data=datasets.DatasetDict({"train": rows, "test": rows}))
except Exception as error:
    assert "Pass one: data['train']" in str(error), error
else:
    raise AssertionError("several splits were taken for one")
"""
GRAIN = """
import grain
items = [(x, y) for x, y in zip(X, Y)]
source = grain.MapDataset.source(items)
for data in (source, source.shuffle(seed=1), source.map(lambda item: item)):
    read(data)
read(source.slice(slice(0, 40)))
"""


def runs(folder, code, name):
    """The code runs, with the package from the folder."""
    asked = f"import {name}; assert {name}.__file__.startswith({str(folder)!r}), {name}.__file__\n"
    # No hub is asked: nothing is fetched by what is read here.
    within = environment(folder, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "home"), TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(
        [sys.executable, "-c", asked + READ + code], env=within, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


HUGGING_FACE_NEEDS = [
    "dill",
    "multiprocess",
    "xxhash",
    "huggingface-hub",
    "httpx2",
    "httpcore2",
    "h11",
    "truststore",
    "tqdm",
]
GRAIN_NEEDS = ["array-record", "etils", "importlib-resources", "zipp", "portpicker"]
"""What they import that the lock has not."""


@pytest.mark.nightly
def test_datasets_of_hugging_face_are_read(tmp_path):
    install(["datasets", *HUGGING_FACE_NEEDS], tmp_path)
    runs(tmp_path, HUGGING_FACE, "datasets")


@pytest.mark.nightly
def test_sources_of_grain_are_read(tmp_path):
    install(["grain", *GRAIN_NEEDS], tmp_path)
    runs(tmp_path, GRAIN, "grain")
