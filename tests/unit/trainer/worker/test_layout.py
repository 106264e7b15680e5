"""Runs of variables that are copied together."""

from itertools import pairwise

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker import layout
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import RUN, SMALL, Entry, Layout, layout_of, numbered, precision_of
from tests.unit.trainer.worker.models import functional
from tests.unit.trainer.worker.trained import BATCHES

sizes = st.one_of(st.integers(0, 64), st.integers(0, 2 * SMALL), st.sampled_from([SMALL, SMALL + 1, RUN]))


@given(st.lists(sizes, min_size=1, max_size=60))
def test_runs_are_all_entries_in_order_and_as_few_as_possible(values):
    entries = tuple(Entry(f"v{i}", (size,), "float32", 0, size) for i, size in enumerate(values))
    made = Layout(
        entries, sum(values) + 1
    )  # all of them trainable, also where nothing but empty ones is drawn
    runs = [entries[run] for run in made.runs]
    assert sum(runs, ()) == entries
    for run in runs:
        small = sum(entry.size for entry in run) <= RUN and all(entry.size <= SMALL for entry in run)
        assert small or len(run) == 1
    for before, after in pairwise(runs):
        joined = [*before, after[0]]
        assert max(entry.size for entry in joined) > SMALL or sum(entry.size for entry in joined) > RUN


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_update_does_not_depend_on_the_runs(wire, monkeypatch):
    def update():
        model = FlatModel(functional(), BATCHES[0], wire, on_host=True)
        buffer = aligned(model.layout.size)
        buffer[:] = model.initial()
        return model.layout.runs, model.step(model.vector.alias(buffer), BATCHES[0]).update

    together, expected = update()
    monkeypatch.setattr(layout, "SMALL", 40)
    monkeypatch.setattr(layout, "RUN", 80)
    apart, found = update()
    assert len(apart) > len(together) == 1
    assert np.array_equal(found, expected)
    assert np.unique(expected).size > 10


def test_the_fingerprint_does_not_depend_on_models_that_were_built_before():
    """A notebook has built others; a worker builds one."""

    def mlp():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3)])

    first, second = layout_of(mlp()), layout_of(mlp())
    assert [entry.path for entry in first.entries] != [entry.path for entry in second.entries]
    assert first.fingerprint == second.fingerprint


def test_numbers_in_paths_are_counted_per_name():
    assert numbered(["dense_7/kernel", "dense_7/bias", "dense_9/kernel", "conv2d/kernel"]) == [
        "dense/kernel",
        "dense/bias",
        "dense_1/kernel",
        "conv2d/kernel",
    ]


def test_the_tensors_are_the_trainable_variables():
    model = functional()
    assert layout_of(model).tensors == len(model.trainable_variables)


def test_mixed_precision_changes_no_layout_and_is_told():
    """A step of it takes half of the time on some accelerators: measurements of both are kept apart."""

    def mlp(policy, last):
        layers = keras.layers.Dense(3, dtype=policy), keras.layers.Dense(3, dtype=last)
        return keras.Sequential(
            [keras.Input((4,)), *layers, keras.layers.Activation("relu", dtype="float64")]
        )

    whole, mixed = mlp("float32", "float32"), mlp("mixed_bfloat16", "float32")
    assert layout_of(whole).fingerprint == layout_of(mixed).fingerprint
    assert (precision_of(whole), precision_of(mixed)) == ("float32", "bfloat16+float32")
