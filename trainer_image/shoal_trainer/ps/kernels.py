"""The update rules: compiled kernels, each a single pass over memory without the GIL.

Updates are memory-bound, so each kernel reads the pushed values from `io` and writes the new parameters to it in the
same pass, in fp32 or bf16 (as uint16). There is no fast-math: results equal Keras' formulas, rounded at each operation;
but for the order of a `reduction`'s sum.

A non-finite pushed value would spread to every worker. The update kernels replace it by 0 and return whether there was
one, in the same pass. To rules with second moments a gradient is not finite either if its square is not: the moment
would be infinite, and the parameter NaN with the next push.

`ahead`: the answer to a push is where the parameters will be after so many more steps of the optimizer's velocity, as
the worker's next gradient will arrive then (0: exactly the parameters). `lookahead` has the kernels that do only that.

The rules are written for single numbers, and run as such in plain Python (`momentum.rule`), which the tests compare
with the compiled code. `n` is the number of values in each array; callers do not pass it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.ps.kernel_loader import kernel, reduction
from shoal_trainer.ps.scalars import (
    NOTHING,
    finite_or_zero,
    mark_change,
    narrow,
    squarable_or_zero,
    widen,
)

Vector = NDArray[np.float32]
Buffer = NDArray[Any]
"""fp32, or uint16 with the bits of bf16."""
ConstVector = Vector
ConstBuffer = Buffer
"""Only read, so it may be memory of TensorFlow."""
Sums = NDArray[np.float64]
"""Results; as long as the rule says."""


# --- encodings ----------------------------------------------------------------------------------------------------


@kernel
def encode(n: int, source: ConstVector, out: Buffer) -> bool:
    """`out` := `source` in the encoding of `out`. Returns whether all values of `out` are finite."""
    seen = np.uint32(0)
    for i in range(n):
        out[i] = narrow(source[i], out[i])
        value = widen(out[i])
        seen = mark_change(seen, value, finite_or_zero(value))
    return bool(seen == 0)


@kernel
def decode(n: int, source: ConstBuffer, out: Vector) -> None:
    """`out` := fp32 of `source`."""
    for i in range(n):
        out[i] = widen(source[i])


@kernel
def adopt(n: int, w: Vector, io: ConstBuffer) -> None:
    """W := io, but keep the more precise fp32 value where w rounds to io."""
    for i in range(n):
        if narrow(w[i], io[i]) != io[i]:
            w[i] = widen(io[i])


@kernel
def finite(n: int, io: ConstBuffer) -> bool:
    """Whether all values are finite."""
    seen = np.uint32(0)
    for i in range(n):
        value = widen(io[i])
        seen = mark_change(seen, value, finite_or_zero(value))
    return bool(seen == 0)


# --- updates ------------------------------------------------------------------------------------------------------


@kernel
def add(n: int, w: Vector, io: Buffer, scale: np.float32) -> bool:
    """W += scale * io: differences."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        x = w[i] + scale * g
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def average(n: int, w: Vector, io: Buffer, share: np.float32) -> bool:
    """W += share (io - w): moving averages, of which `io` has what was observed. What is not finite moves nothing."""
    seen = np.uint32(0)
    for i in range(n):
        x = w[i]
        towards = widen(io[i]) - x
        distance = finite_or_zero(towards)
        seen = mark_change(seen, towards, distance)
        x = x + share * distance
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def sgd(n: int, w: Vector, io: Buffer, lr: np.float32, decay: np.float32) -> bool:
    """W -= lr g (Keras SGD without momentum). `decay` = lr * weight decay, applied first, as in Keras."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        x = w[i]
        x = x - x * decay
        x = x - lr * g
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def momentum(
    n: int,
    w: Vector,
    m: Vector,
    io: Buffer,
    lr: np.float32,
    decay: np.float32,
    mu: np.float32,
    ahead: np.float32,
) -> bool:
    """M := mu m - lr g; w += m (Keras SGD, momentum > 0); io := w + ahead m."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        v = mu * m[i] - lr * g
        m[i] = v
        x = w[i]
        x = x - x * decay
        x = x + v
        w[i] = x
        io[i] = narrow(x + ahead * v, io[i])
    return bool(seen != 0)


@kernel
def nesterov(
    n: int,
    w: Vector,
    m: Vector,
    io: Buffer,
    lr: np.float32,
    decay: np.float32,
    mu: np.float32,
    ahead: np.float32,
) -> bool:
    """M := mu m - lr g; w += mu m - lr g (Keras SGD, nesterov=True); io := w + ahead m."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        step = lr * g
        v = mu * m[i] - step
        m[i] = v
        x = w[i]
        x = x - x * decay
        x = x + (mu * v - step)
        w[i] = x
        io[i] = narrow(x + ahead * v, io[i])
    return bool(seen != 0)


@kernel
def adam(
    n: int,
    w: Vector,
    m: Vector,
    v: Vector,
    io: Buffer,
    alpha: np.float32,
    decay: np.float32,
    one_less_b1: np.float32,
    one_less_b2: np.float32,
    epsilon: np.float32,
    ahead: np.float32,
) -> bool:
    """M += (g - m)(1 - b1); v += (g² - v)(1 - b2); w -= alpha m / (√v + eps) (Keras Adam and AdamW).

    `ahead` in steps of this size: io := w - ahead alpha m / (√v + eps).
    """
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = squarable_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        first = m[i] + (g - m[i]) * one_less_b1
        second = v[i] + (g * g - v[i]) * one_less_b2
        m[i] = first
        v[i] = second
        x = w[i]
        x = x - x * decay
        step = (first * alpha) / (np.sqrt(second) + epsilon)
        x = x - step
        w[i] = x
        io[i] = narrow(x - ahead * step, io[i])
    return bool(seen != 0)


@kernel
def nadam(
    n: int,
    w: Vector,
    m: Vector,
    v: Vector,
    io: Buffer,
    of_m: np.float32,
    of_g: np.float32,
    decay: np.float32,
    one_less_b1: np.float32,
    one_less_b2: np.float32,
    bias: np.float32,
    epsilon: np.float32,
    ahead: np.float32,
) -> bool:
    """Moments as in `adam`; w -= (of_m m + of_g g) / (√(v / bias) + eps) (Keras Nadam).

    io := w - ahead m / (√(v / bias) + eps).
    """
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = squarable_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        first = m[i] + (g - m[i]) * one_less_b1
        second = v[i] + (g * g - v[i]) * one_less_b2
        m[i] = first
        v[i] = second
        root = np.sqrt(second / bias) + epsilon
        x = w[i]
        x = x - x * decay
        x = x - (of_m * first + of_g * g) / root
        w[i] = x
        io[i] = narrow(x - (ahead * first) / root, io[i])
    return bool(seen != 0)


@kernel
def lion(
    n: int,
    w: Vector,
    m: Vector,
    io: Buffer,
    lr: np.float32,
    decay: np.float32,
    b1: np.float32,
    one_less_b1: np.float32,
    b2: np.float32,
    one_less_b2: np.float32,
    ahead: np.float32,
) -> bool:
    """W -= lr sign(b1 m + (1 - b1) g); m := b2 m + (1 - b2) g (Keras Lion); io := w - ahead sign(m)."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        x = w[i]
        x = x - x * decay
        x = x - lr * (np.sign(m[i] * b1 + g * one_less_b1) + NOTHING)
        first = m[i] * b2 + g * one_less_b2
        m[i] = first
        w[i] = x
        io[i] = narrow(x - ahead * (np.sign(first) + NOTHING), io[i])
    return bool(seen != 0)


@kernel
def rmsprop(
    n: int,
    w: Vector,
    v: Vector,
    io: Buffer,
    lr: np.float32,
    decay: np.float32,
    rho: np.float32,
    one_less_rho: np.float32,
    epsilon: np.float32,
) -> bool:
    """V := rho v + (1 - rho) g²; w -= lr g / √(v + eps) (Keras RMSprop)."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = squarable_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        second = rho * v[i] + one_less_rho * (g * g)
        v[i] = second
        x = w[i]
        x = x - x * decay
        x = x - (lr * g) / np.sqrt(second + epsilon)
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def rmsprop_momentum(
    n: int,
    w: Vector,
    m: Vector,
    v: Vector,
    io: Buffer,
    lr: np.float32,
    decay: np.float32,
    mu: np.float32,
    rho: np.float32,
    one_less_rho: np.float32,
    epsilon: np.float32,
    ahead: np.float32,
) -> bool:
    """V as in `rmsprop`; m := mu m - lr g / √(v + eps); w += m (Keras RMSprop, momentum > 0); io := w + ahead m."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = squarable_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        second = rho * v[i] + one_less_rho * (g * g)
        v[i] = second
        velocity = mu * m[i] - (lr * g) / np.sqrt(second + epsilon)
        m[i] = velocity
        x = w[i]
        x = x - x * decay
        x = x + velocity
        w[i] = x
        io[i] = narrow(x + ahead * velocity, io[i])
    return bool(seen != 0)


@kernel
def adagrad(
    n: int, w: Vector, a: Vector, io: Buffer, lr: np.float32, decay: np.float32, epsilon: np.float32
) -> bool:
    """A += g²; w -= lr g / √(a + eps) (Keras Adagrad)."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = squarable_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        total = a[i] + g * g
        a[i] = total
        x = w[i]
        x = x - x * decay
        x = x - (lr * g) / np.sqrt(total + epsilon)
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@reduction
def squares(n: int, io: ConstBuffer, sums: Sums) -> None:
    """Add io·io to the first of `sums`."""
    total = np.float32(0)
    for i in range(n):
        total += widen(io[i]) * widen(io[i])
    sums[0] += np.float64(total)
