"""The update rules: compiled kernels, each a single pass over memory without the GIL.

Updates are memory-bound, so each kernel reads the pushed values from `io` and writes the new parameters to it in the
same pass, in fp32 or bf16 (as uint16). There is no fast-math: results equal Keras' formulas, rounded at each operation.

A non-finite pushed value would spread to every worker. The update kernels replace it by 0 and return whether there was
one, in the same pass.

The rules are written for single numbers, and run as such in plain Python (`momentum.rule`), which the tests compare
with the compiled code. `n` is the number of values in each array; callers do not pass it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.ps.kernel_loader import kernel

Vector = NDArray[np.float32]
Buffer = NDArray[Any]
"""fp32, or uint16 with the bits of bf16."""
ConstVector = Vector
ConstBuffer = Buffer
"""Only read, so it may be memory of TensorFlow."""
Sums = NDArray[np.float64]
"""Results; as long as the rule says."""


# --- bf16: the upper half of fp32. `kernel_compiler` has the compiled counterparts ---------------------------------


def widen(value: Any) -> Any:
    """The fp32 value of an element of a buffer."""
    return value if isinstance(value, np.float32) else (np.uint32(value) << np.uint32(16)).view(np.float32)


def narrow(value: Any, like: Any) -> Any:
    """`value` in the type of `like`, rounded to nearest even; NaN stays NaN."""
    if isinstance(like, np.float32):
        return value
    bits = value.view(np.uint32)
    quiet, rounded = (
        bits | np.uint32(0x400000),
        bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF),
    )
    return np.uint16((quiet if np.isnan(value) else rounded) >> np.uint32(16))


def finite_or_zero(value: Any) -> Any:
    """`value`, or 0 where it is not finite."""
    return value if np.isfinite(value) else np.float32(0)


def mark_change(seen: Any, value: Any, used: Any) -> Any:
    """`seen`, made nonzero if `used` differs from `value`. It has 32 bits, like the values, so that loops vectorize."""
    return seen | (value.view(np.uint32) ^ used.view(np.uint32))


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
    """W += scale * io: differences, and changes of moving statistics."""
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
    n: int, w: Vector, m: Vector, io: Buffer, lr: np.float32, decay: np.float32, mu: np.float32
) -> bool:
    """M := mu m - lr g; w += m (Keras SGD, momentum > 0)."""
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
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def nesterov(
    n: int, w: Vector, m: Vector, io: Buffer, lr: np.float32, decay: np.float32, mu: np.float32
) -> bool:
    """M := mu m - lr g; w += mu m - lr g (Keras SGD, nesterov=True)."""
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
        io[i] = narrow(x, io[i])
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
) -> bool:
    """M += (g - m)(1 - b1); v += (g² - v)(1 - b2); w -= alpha m / (√v + eps) (Keras Adam and AdamW)."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        first = m[i] + (g - m[i]) * one_less_b1
        second = v[i] + (g * g - v[i]) * one_less_b2
        m[i] = first
        v[i] = second
        x = w[i]
        x = x - x * decay
        x = x - (first * alpha) / (np.sqrt(second) + epsilon)
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def adagrad(
    n: int, w: Vector, a: Vector, io: Buffer, lr: np.float32, decay: np.float32, epsilon: np.float32
) -> bool:
    """A += g²; w -= lr g / √(a + eps) (Keras Adagrad)."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        total = a[i] + g * g
        a[i] = total
        x = w[i]
        x = x - x * decay
        x = x - (lr * g) / np.sqrt(total + epsilon)
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


# --- Adasum -------------------------------------------------------------------------------------------------------


@kernel
def products(n: int, a: ConstVector, io: ConstBuffer, sums: Sums) -> None:
    """Add (a·a, a·d, d·d) to `sums`, in double precision."""
    aa = 0.0
    ad = 0.0
    dd = 0.0
    for i in range(n):
        x = np.float64(a[i])
        y = np.float64(finite_or_zero(widen(io[i])))
        aa += x * x
        ad += x * y
        dd += y * y
    sums[0] += aa
    sums[1] += ad
    sums[2] += dd


@kernel
def merge(n: int, w: Vector, a: Vector, io: Buffer, weight_a: np.float32, weight_d: np.float32) -> bool:
    """A' := weight_a a + weight_d io; w += a' - a: replace the combination so far by the one with `io`."""
    seen = np.uint32(0)
    for i in range(n):
        pushed = widen(io[i])
        d = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, d)
        old = a[i]
        new = weight_a * old + weight_d * d
        a[i] = new
        x = w[i] + (new - old)
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)
