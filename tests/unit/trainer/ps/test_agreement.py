"""How far gradients of different workers agree: the signal's share, whatever the pieces and the encoding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps import kernels
from shoal_trainer.ps.agreement import SAMPLE, Agreement
from shoal_trainer.ps.pieces import Window

SIZE = 2 * SAMPLE + 777
"""Every third value is compared."""


def pushes(share: float, count: int, seed: int = 0) -> list[np.ndarray]:
    """Gradients of which this share of the squares is the same in all."""
    rng = np.random.default_rng(seed)
    signal = rng.standard_normal(SIZE)
    return [
        (share**0.5 * signal + (1 - share) ** 0.5 * rng.standard_normal(SIZE)).astype(np.float32)
        for _ in range(count)
    ]


def told(agreement: Agreement, worker: int, gradient: np.ndarray) -> None:
    agreement.learn(agreement.meet(worker, gradient))


def in_bf16(gradient: np.ndarray) -> np.ndarray:
    coded = np.empty(gradient.size, np.uint16)
    kernels.encode(gradient, coded)
    return coded


@pytest.mark.parametrize("coded", [np.copy, in_bf16])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_agreement_is_the_share_of_the_signal(
    share: float, coded: Callable[[np.ndarray], np.ndarray]
) -> None:
    agreement = Agreement(SIZE)
    for turn, gradient in enumerate(pushes(share, 100)):
        told(agreement, turn % 3, coded(gradient))
    assert agreement.mean == pytest.approx(share, abs=0.03)


def test_one_worker_agrees_with_nobody() -> None:
    agreement = Agreement(SIZE)
    for gradient in pushes(1.0, 20):
        told(agreement, 0, gradient)
    assert agreement.mean == 0


@given(st.lists(st.integers(0, SIZE), max_size=8), st.integers(0, 100))
def test_pieces_tell_as_much_as_the_whole(cuts: list[int], seed: int) -> None:
    ends = [0, *sorted(cuts), SIZE]
    whole, pieces = Agreement(SIZE), Agreement(SIZE)
    for worker, gradient in enumerate(pushes(0.5, 3, seed)):
        expected, found = whole.meet(worker, gradient), np.zeros(3)
        for low, high in pairwise(ends):
            found += pieces.meet(worker, Window(gradient, 0, low, high, SIZE))
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, -2.0, 1e30, np.inf, np.nan])), max_size=60
    )
)
def test_whatever_workers_push_it_is_a_mean_of_cosines(pushed: list[tuple[int, float]]) -> None:
    agreement = Agreement(4)
    for worker, value in pushed:
        told(agreement, worker, np.full(4, value, np.float32))
        assert abs(agreement.mean) <= 1 + 1e-9
    for turn in range(200):
        told(agreement, turn % 2, np.ones(4, np.float32))
    assert agreement.mean == pytest.approx(1, abs=1e-3)


def test_shard_without_trainable_values_learns_nothing() -> None:
    agreement = Agreement(0)
    told(agreement, 0, np.empty(0, np.float32))
    told(agreement, 1, np.empty(0, np.float32))
    assert agreement.mean == 0
