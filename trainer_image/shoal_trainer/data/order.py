"""Which sample is at a position of an epoch: each is at one, and at another one in another epoch. Pure."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

MOST_DRAWN = 1 << 22
"""Samples up to which an epoch's order is drawn at once, and kept: it has 8 bytes for each of them."""
ROUNDS = 8

Positions = npt.NDArray[np.int64]


def order_name(size: int) -> str:
    """What the order of so many samples is called where workers are compared; "": as in the first version of Shoal.

    Whoever changes what `samples_at` answers changes this: a job that goes on with another image would train some
    samples twice and others never.
    """
    return "" if size <= MOST_DRAWN else ", scattered"


def samples_at(start: int, stop: int, size: int, seed: int, epoch: int | None) -> Positions:
    """The samples at the positions [start, stop) of an epoch of `size` samples; without one, in their own order."""
    if epoch is None:
        return np.arange(start, stop)
    if size <= MOST_DRAWN:
        return _drawn(size, seed, epoch)[start:stop]
    return _scattered(np.arange(start, stop), size, seed, epoch)


@functools.lru_cache(maxsize=2)  # who reads ahead is in two epochs
def _drawn(size: int, seed: int, epoch: int) -> Positions:
    return np.random.default_rng((seed, epoch)).permutation(size)


def _scattered(positions: Positions, size: int, seed: int, epoch: int) -> Positions:
    """The same of more samples than one may keep: a Feistel network is a permutation, whatever its rounds compute.

    It is one of the next power of 4. What lies beyond `size` walks on until it is within (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002).
    """
    half = np.uint64((size - 1).bit_length() + 1 >> 1)
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)
    found = positions.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        found[outside] = left << half | right
        outside = found >= size
    return found.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each bit depends on all bits: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
