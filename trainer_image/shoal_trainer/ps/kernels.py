"""The update rules: compiled kernels, each a single pass over memory without the GIL.

Updates are memory-bound, so each kernel reads the pushed values from `io` and writes the new parameters to it in the
same pass, in fp32 or bf16 (as uint16). There is no fast-math: results equal Keras' formulas, rounded at each operation.

A non-finite pushed value would spread to every worker. The update kernels replace it by 0 and return whether there was
one; the check takes 2 % of the time of momentum and Adam, 3 to 5 % of plain SGD's.

Numba compiles for `NUMBA_CPU_NAME` and caches next to this file, or in `NUMBA_CACHE_DIR`. The image build compiles all
kernels ahead of time with `python -m shoal_trainer.ps.kernels`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Vector = NDArray[np.float32]
Buffer = NDArray[Any]
"""fp32, or uint16 with the bits of bf16."""


def kernel(function: F) -> F:
    """Compile on first use, cached on disk; the function runs without the GIL."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


# --- bf16: the upper half of fp32 --------------------------------------------------------------------------------


def _same(_context: Any, _builder: Any, _sig: Any, args: Any) -> Any:
    return args[0]


def _widen(typingctx: Any, value: Any) -> Any:  # noqa: ARG001  the signature that Numba requires
    """The fp32 value of an element of a buffer."""
    if value == types.float32:
        return types.float32(types.float32), _same

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), codegen


def _narrow(typingctx: Any, value: Any, like: Any) -> Any:  # noqa: ARG001
    """`value` in the type of `like`, rounded to nearest even; NaN stays NaN."""
    if like == types.float32:
        return types.float32(types.float32, types.float32), _same

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
        quiet = builder.or_(bits, word(0x400000))
        chosen = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
        return builder.trunc(builder.lshr(chosen, word(16)), ir.IntType(16))

    return types.uint16(types.float32, types.uint16), codegen


def _finite_or_zero(typingctx: Any, value: Any) -> Any:  # noqa: ARG001
    """`value`, or 0 where it is not finite."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        word, single = ir.IntType(32), ir.FloatType()
        size = builder.bitcast(builder.and_(builder.bitcast(args[0], word), word(0x7FFFFFFF)), single)
        finite = builder.fcmp_ordered("<", size, single(float("inf")))
        return builder.select(finite, args[0], single(0.0))

    return types.float32(types.float32), codegen


def _mark_change(typingctx: Any, seen: Any, value: Any, used: Any) -> Any:  # noqa: ARG001
    """`seen`, made nonzero if `used` differs from `value`. It has 32 bits, like the values, so that loops vectorize."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        word = ir.IntType(32)
        seen, value, used = args[0], builder.bitcast(args[1], word), builder.bitcast(args[2], word)
        return builder.or_(seen, builder.xor(value, used))

    return types.uint32(types.uint32, types.float32, types.float32), codegen


widen = intrinsic(_widen)
narrow = intrinsic(_narrow)
finite_or_zero = intrinsic(_finite_or_zero)
mark_change = intrinsic(_mark_change)


@kernel
def encode(source: Vector, out: Buffer) -> bool:
    """`out` := `source` in the encoding of `out`. Returns whether all values of `out` are finite."""
    seen = np.uint32(0)
    for i in range(source.size):
        out[i] = narrow(source[i], out[i])
        value = widen(out[i])
        seen = mark_change(seen, value, finite_or_zero(value))
    return bool(seen == 0)


@kernel
def decode(source: Buffer, out: Vector) -> None:
    """`out` := fp32 of `source`."""
    for i in range(source.size):
        out[i] = widen(source[i])


@kernel
def adopt(w: Vector, io: Buffer) -> None:
    """W := io, but keep the more precise fp32 value where w rounds to io."""
    for i in range(w.size):
        if narrow(w[i], io[i]) != io[i]:
            w[i] = widen(io[i])


@kernel
def finite(io: Buffer) -> bool:
    """Whether all values are finite."""
    seen = np.uint32(0)
    for i in range(io.size):
        value = widen(io[i])
        seen = mark_change(seen, value, finite_or_zero(value))
    return bool(seen == 0)


# --- updates ------------------------------------------------------------------------------------------------------


@kernel
def add(w: Vector, io: Buffer, scale: np.float32) -> bool:
    """W += scale * io: differences, and changes of moving statistics."""
    seen = np.uint32(0)
    for i in range(w.size):
        pushed = widen(io[i])
        g = finite_or_zero(pushed)
        seen = mark_change(seen, pushed, g)
        x = w[i] + scale * g
        w[i] = x
        io[i] = narrow(x, io[i])
    return bool(seen != 0)


@kernel
def sgd(w: Vector, io: Buffer, lr: np.float32, decay: np.float32) -> bool:
    """W -= lr g (Keras SGD without momentum). `decay` = lr * weight decay, applied first, as in Keras."""
    seen = np.uint32(0)
    for i in range(w.size):
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
def momentum(w: Vector, m: Vector, io: Buffer, lr: np.float32, decay: np.float32, mu: np.float32) -> bool:
    """M := mu m - lr g; w += m (Keras SGD, momentum > 0)."""
    seen = np.uint32(0)
    for i in range(w.size):
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
def nesterov(w: Vector, m: Vector, io: Buffer, lr: np.float32, decay: np.float32, mu: np.float32) -> bool:
    """M := mu m - lr g; w += mu m - lr g (Keras SGD, nesterov=True)."""
    seen = np.uint32(0)
    for i in range(w.size):
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
    for i in range(w.size):
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
def adagrad(w: Vector, a: Vector, io: Buffer, lr: np.float32, decay: np.float32, epsilon: np.float32) -> bool:
    """A += g²; w -= lr g / √(a + eps) (Keras Adagrad)."""
    seen = np.uint32(0)
    for i in range(w.size):
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
def products(a: Vector, io: Buffer) -> tuple[float, float, float]:
    """(a·a, a·d, d·d) in double precision."""
    aa = 0.0
    ad = 0.0
    dd = 0.0
    for i in range(a.size):
        x = np.float64(a[i])
        y = np.float64(finite_or_zero(widen(io[i])))
        aa += x * x
        ad += x * y
        dd += y * y
    return aa, ad, dd


@kernel
def merge(w: Vector, a: Vector, io: Buffer, weight_a: np.float32, weight_d: np.float32) -> bool:
    """A' := weight_a a + weight_d io; w += a' - a: replace the combination so far by the one with `io`."""
    seen = np.uint32(0)
    for i in range(w.size):
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


# --- ahead of time ------------------------------------------------------------------------------------------------


def compile_all() -> Iterator[tuple[str, float]]:
    """Compile every kernel for both encodings into the cache; yields (name, seconds)."""
    w, m, v = (np.zeros(1, np.float32) for _ in range(3))
    s = np.float32(0.5)
    for dtype in (np.float32, np.uint16):
        io, made, pushed = np.zeros(1, dtype), np.zeros(1, dtype), np.zeros(1, np.float32)
        made.flags.writeable = pushed.flags.writeable = False  # like arrays from TensorFlow
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (adopt, (w, io)),
            (add, (w, io, s)),
            (sgd, (w, io, s, s)),
            (momentum, (w, m, io, s, s, s)),
            (nesterov, (w, m, io, s, s, s)),
            (adam, (w, m, v, io, s, s, s, s, s)),
            (adagrad, (w, m, io, s, s, s)),
            (products, (w, io)),
            (merge, (w, m, io, s, s)),
            (finite, (made,)),
            (encode, (w, io)),
            (encode, (pushed, io)),
            (decode, (io, w)),
        ]
        for function, arguments in calls:
            begin = time.perf_counter()
            function(*arguments)
            yield f"{function.__name__}/{np.dtype(dtype).name}", time.perf_counter() - begin


if __name__ == "__main__":
    # As a script this file is `__main__`; the cache needs the kernels of the imported module.
    from shoal_trainer.ps import kernels as module  # noqa: PLW0406

    total = sum(seconds for _, seconds in module.compile_all())
    sys.stdout.write(f"update kernels compiled for {numba.config.CPU_NAME or 'this CPU'} in {total:.1f} s\n")
