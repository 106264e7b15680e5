"""The kernels of where the parameters will be, when a gradient that is computed on them arrives.

See `kernels`. `ahead`, `scale`: so many steps of the optimizer's velocity, or of a push that is still being sent.
"""

from __future__ import annotations

import numpy as np

from shoal_trainer.ps.kernel_loader import kernel
from shoal_trainer.ps.kernels import Buffer, ConstBuffer, ConstVector, Vector
from shoal_trainer.ps.scalars import NOTHING, finite_or_zero, narrow, squarable_or_zero, widen


@kernel
def glide(n: int, w: ConstVector, m: ConstVector, io: Buffer, ahead: np.float32) -> None:
    """Io := w + ahead m: parameters that follow the velocity of SGD."""
    for i in range(n):
        io[i] = narrow(w[i] + ahead * m[i], io[i])


@kernel
def glide_adam(
    n: int, w: ConstVector, m: ConstVector, v: ConstVector, io: Buffer, ahead: np.float32, epsilon: np.float32
) -> None:
    """Io := w - ahead m / (√v + eps): the same with Adam."""
    for i in range(n):
        io[i] = narrow(w[i] - (m[i] * ahead) / (np.sqrt(v[i]) + epsilon), io[i])


@kernel
def glide_lion(n: int, w: ConstVector, m: ConstVector, io: Buffer, ahead: np.float32) -> None:
    """Io := w - ahead sign(m): the same with Lion."""
    for i in range(n):
        io[i] = narrow(w[i] - ahead * (np.sign(m[i]) + NOTHING), io[i])


@kernel
def include(n: int, w: ConstVector, io: ConstBuffer, out: Vector, scale: np.float32) -> None:
    """Out := w + scale io: parameters with a difference, or a gradient, that is still being sent."""
    for i in range(n):
        out[i] = w[i] + scale * finite_or_zero(widen(io[i]))


@kernel
def include_adam(
    n: int,
    w: ConstVector,
    v: Vector,
    io: ConstBuffer,
    out: Vector,
    scale: np.float32,
    one_less_b2: np.float32,
    bias: np.float32,
    epsilon: np.float32,
) -> None:
    """V += (g² - v)(1 - b2); out := w - scale g / (√(v / bias) + eps): the same for a gradient in Adam."""
    for i in range(n):
        g = squarable_or_zero(widen(io[i]))
        second = v[i] + (g * g - v[i]) * one_less_b2
        v[i] = second
        out[i] = w[i] - (scale * g) / (np.sqrt(second / bias) + epsilon)


@kernel
def include_rmsprop(
    n: int,
    w: ConstVector,
    v: Vector,
    io: ConstBuffer,
    out: Vector,
    scale: np.float32,
    rho: np.float32,
    one_less_rho: np.float32,
    epsilon: np.float32,
) -> None:
    """V := rho v + (1 - rho) g²; out := w - scale g / √(v + eps): the same for a gradient in RMSprop."""
    for i in range(n):
        g = squarable_or_zero(widen(io[i]))
        second = rho * v[i] + one_less_rho * (g * g)
        v[i] = second
        out[i] = w[i] - (scale * g) / np.sqrt(second + epsilon)
