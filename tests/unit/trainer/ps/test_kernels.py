"""Every kernel computes the formula in its docstring, in both encodings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal_trainer.ps import kernel_loader, kernels, lookahead
from shoal_trainer.ps.aligned import aligned, octets
from shoal_trainer.ps.kernel_loader import ENCODINGS, KERNELS

F = np.float32


def bits_of(value: NDArray[Any]) -> NDArray[np.uint16]:
    """bf16 by the definition: round the upper 16 bits to nearest, ties to even."""
    word = value.view(np.uint32).astype(np.uint64)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


def wide(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def vector(n: int, seed: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**120, min_value=-(2.0**120)),
        min_size=1,
        max_size=50,
    )
)
def test_bf16_rounds_to_nearest_even(values: list[float]) -> None:
    source = np.array(values, np.float32)
    out = aligned(source.size, np.uint16)
    kernels.encode(source, out)
    np.testing.assert_array_equal(out, bits_of(source))
    back = aligned(source.size)
    kernels.decode(out, back)
    np.testing.assert_array_equal(back, wide(out))


def test_bf16_keeps_non_finite_values() -> None:
    special = np.array([np.inf, -np.inf, np.nan, np.uint32(0x7FFFFFFF).view(np.float32)], np.float32)
    out = aligned(4, np.uint16)
    kernels.encode(special, out)
    back = aligned(4)
    kernels.decode(out, back)
    assert back[0] == np.inf
    assert back[1] == -np.inf
    assert np.isnan(back[2:]).all()


def momentum(w: Any, m: Any, g: Any, lr: F, decay: F, mu: F) -> tuple[Any, Any]:
    m = mu * m - lr * g
    return (w - w * decay) + m, m


def nesterov(w: Any, m: Any, g: Any, lr: F, decay: F, mu: F) -> tuple[Any, Any]:
    m = mu * m - lr * g
    return (w - w * decay) + (mu * m - lr * g), m


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_update_kernels_match_their_formulas(n: int, bf16: bool) -> None:  # noqa: PLR0915
    w, m, v, g = vector(n, 1), vector(n, 2), vector(n, 3) ** 2, vector(n, 4, 0.1)

    def exchange() -> NDArray[np.generic]:
        return bits_of(g) if bf16 else g.copy()

    def decoded_gradient() -> NDArray[np.float32]:
        return wide(bits_of(g)) if bf16 else g

    def check(io: Any, new: Any, reference: Any) -> None:
        np.testing.assert_array_equal(new, reference)
        np.testing.assert_array_equal(io, bits_of(reference) if bf16 else reference)

    gradient = decoded_gradient()
    lr, decay, mu, eps = F(0.01), F(0.001), F(0.9), F(1e-7)

    new, io = w.copy(), exchange()
    kernels.sgd(new, io, lr, decay)
    check(io, new, (w - w * decay) - lr * gradient)

    for rule, reference in ((kernels.momentum, momentum), (kernels.nesterov, nesterov)):
        new, state, io = w.copy(), m.copy(), exchange()
        rule(new, state, io, lr, decay, mu, F(0))
        expected, moved = reference(w, m, gradient, lr, decay, mu)
        np.testing.assert_array_equal(state, moved)
        check(io, new, expected)

        new, state, io = w.copy(), m.copy(), exchange()
        rule(new, state, io, lr, decay, mu, F(2.5))
        np.testing.assert_array_equal(new, expected)
        later = expected + F(2.5) * moved
        np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    new, first, second, io = w.copy(), m.copy(), v.copy(), exchange()
    kernels.adam(new, first, second, io, lr, decay, F(0.1), F(0.001), eps, F(0))
    m2, v2 = m + (gradient - m) * F(0.1), v + (gradient * gradient - v) * F(0.001)
    np.testing.assert_array_equal(first, m2)
    np.testing.assert_array_equal(second, v2)
    step = (m2 * lr) / (np.sqrt(v2) + eps)
    check(io, new, (w - w * decay) - step)
    again, first, second, io = w.copy(), m.copy(), v.copy(), exchange()
    kernels.adam(again, first, second, io, lr, decay, F(0.1), F(0.001), eps, F(2.5))
    np.testing.assert_array_equal(again, new)
    later = new - F(2.5) * step
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    io = exchange()
    lookahead.glide(w, m, io, F(2.5))
    np.testing.assert_array_equal(io, bits_of(w + F(2.5) * m) if bf16 else w + F(2.5) * m)
    io, later = exchange(), w - (m * F(0.01)) / (np.sqrt(v) + eps)
    lookahead.glide_adam(w, m, v, io, F(0.01), eps)
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    out, io = aligned(n), exchange()
    lookahead.include(w, io, out, F(-0.5))
    np.testing.assert_array_equal(out, w + F(-0.5) * gradient)
    np.testing.assert_array_equal(io, exchange())
    second = v.copy()
    lookahead.include_adam(w, second, io, out, F(0.01), F(0.001), F(0.5), eps)
    np.testing.assert_array_equal(second, v2)
    np.testing.assert_array_equal(out, w - (F(0.01) * gradient) / (np.sqrt(v2 / F(0.5)) + eps))
    sums = np.zeros(3)
    kernels.squares(io, sums)
    assert sums[0] == pytest.approx(np.square(gradient, dtype=np.float64).sum(), rel=1e-5)

    new, total, io = w.copy(), v.copy(), exchange()
    kernels.adagrad(new, total, io, lr, decay, eps)
    check(io, new, (w - w * decay) - (lr * gradient) / np.sqrt(v + gradient * gradient + eps))

    second, rho = F(0.9) * v + F(0.1) * (gradient * gradient), (F(0.9), F(0.1), eps)
    new, kept, io = w.copy(), v.copy(), exchange()
    kernels.rmsprop(new, kept, io, lr, decay, *rho)
    step = (lr * gradient) / np.sqrt(second + eps)
    np.testing.assert_array_equal(kept, second)
    check(io, new, (w - w * decay) - step)
    kept, io = v.copy(), exchange()
    lookahead.include_rmsprop(w, kept, io, out, lr, *rho)
    np.testing.assert_array_equal(kept, second)
    np.testing.assert_array_equal(out, w - step)
    new, state, kept, io = w.copy(), m.copy(), v.copy(), exchange()
    kernels.rmsprop_momentum(new, state, kept, io, lr, decay, mu, *rho, F(2.5))
    np.testing.assert_array_equal(kept, second)
    np.testing.assert_array_equal(state, mu * m - step)
    np.testing.assert_array_equal(new, (w - w * decay) + state)
    later = new + F(2.5) * state
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    new, state, io = w.copy(), m.copy(), exchange()
    kernels.lion(new, state, io, lr, decay, F(0.9), F(0.1), F(0.99), F(0.01), F(2.5))
    np.testing.assert_array_equal(state, m * F(0.99) + gradient * F(0.01))
    np.testing.assert_array_equal(new, (w - w * decay) - lr * np.sign(m * F(0.9) + gradient * F(0.1)))
    later = new - F(2.5) * np.sign(state)
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)
    io, later = exchange(), w - F(2.5) * np.sign(m)
    lookahead.glide_lion(w, m, io, F(2.5))
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    new, first, kept, io = w.copy(), m.copy(), v.copy(), exchange()
    of_m, of_g, bias = F(0.02), F(0.03), F(0.5)
    kernels.nadam(new, first, kept, io, of_m, of_g, decay, F(0.1), F(0.001), bias, eps, F(2.5))
    np.testing.assert_array_equal(first, m2)
    np.testing.assert_array_equal(kept, v2)
    root = np.sqrt(v2 / bias) + eps
    np.testing.assert_array_equal(new, (w - w * decay) - (of_m * m2 + of_g * gradient) / root)
    later = new - (F(2.5) * m2) / root
    np.testing.assert_array_equal(io, bits_of(later) if bf16 else later)

    new, io = w.copy(), exchange()
    kernels.add(new, io, F(0.5))
    check(io, new, w + F(0.5) * gradient)

    new, io = w.copy(), exchange()
    kernels.encode(new, io)
    check(io, new, w)


@pytest.mark.by_day(64)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sgd",
        "momentum",
        "nesterov",
        "adam",
        "nadam",
        "lion",
        "rmsprop",
        "rmsprop_momentum",
        "adagrad",
    ],
)
@pytest.mark.parametrize("index", [0, 7, 70, 130])
def test_non_finite_gradient_is_replaced_by_zero_and_reported(
    name: str, bad: float, dtype: Any, index: int
) -> None:
    calls: dict[str, Callable[..., Any]] = {
        "add": lambda w, _a, _b, io: kernels.add(w, io, F(0.5)),
        "sgd": lambda w, _a, _b, io: kernels.sgd(w, io, F(0.1), F(0)),
        "momentum": lambda w, a, _b, io: kernels.momentum(w, a, io, F(0.1), F(0), F(0.9), F(1)),
        "nesterov": lambda w, a, _b, io: kernels.nesterov(w, a, io, F(0.1), F(0), F(0.9), F(1)),
        "adam": lambda w, a, b, io: kernels.adam(w, a, b, io, F(0.1), F(0), F(0.1), F(0.01), F(1e-7), F(1)),
        "nadam": lambda w, a, b, io: kernels.nadam(
            w, a, b, io, F(0.1), F(0.2), F(0), F(0.1), F(0.01), F(0.5), F(1e-7), F(1)
        ),
        "lion": lambda w, a, _b, io: kernels.lion(
            w, a, io, F(0.1), F(0), F(0.9), F(0.1), F(0.99), F(0.01), F(1)
        ),
        "rmsprop": lambda w, a, _b, io: kernels.rmsprop(w, a, io, F(0.1), F(0), F(0.9), F(0.1), F(1e-7)),
        "rmsprop_momentum": lambda w, a, b, io: kernels.rmsprop_momentum(
            w, a, b, io, F(0.1), F(0), F(0.9), F(0.9), F(0.1), F(1e-7), F(1)
        ),
        "adagrad": lambda w, a, _b, io: kernels.adagrad(w, a, io, F(0.1), F(0), F(1e-7)),
    }

    def run(value: float) -> tuple[bool, list[NDArray[Any]]]:
        gradient = wide(bits_of(vector(131, 3)))  # values that both encodings represent
        gradient[index] = value
        io = aligned(131, dtype)
        io[:] = gradient if dtype is np.float32 else bits_of(np.where(np.isnan(gradient), 0, gradient))
        if dtype is np.uint16 and np.isnan(value):
            io[index] = 0xFFC0 if np.signbit(value) else 0x7FC0
        state = [vector(131, 1), np.abs(vector(131, 2)), np.abs(vector(131, 4))]
        return bool(calls[name](*state, io)), [*state, io]

    reported, updated = run(bad)
    silent, clean = run(0.0)
    assert (reported, silent) == (True, False)
    for mine, expected in zip(updated, clean, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("value", [3.4028235e38, -3.4028235e38, 1e-45, -0.0])
def test_finite_extremes_are_applied_unchanged(value: float) -> None:
    w, io = np.zeros(20, np.float32), np.full(20, value, np.float32)
    assert not kernels.add(w, io, F(1))
    np.testing.assert_array_equal(w.view(np.uint32), (np.zeros(20, np.float32) + F(value)).view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 7, 70, 130])
def test_single_non_finite_value_is_detected(bad: float, dtype: Any, index: int) -> None:
    values = np.full(131, 3.38951314e38, np.float32)  # the largest bf16 value
    values[::2] = 1e-45
    io = values if dtype is np.float32 else bits_of(values)
    assert kernels.finite(io)
    out = np.empty_like(io)
    assert kernels.encode(values, out)
    np.testing.assert_array_equal(out, io)
    io[index] = bad if dtype is np.float32 else np.float32(bad).view(np.uint32) >> 16
    assert not kernels.finite(io)
    values[index] = bad
    assert not kernels.encode(values, out)
    np.testing.assert_array_equal(out, io)


def test_overflow_of_bf16_is_reported() -> None:
    values = np.array([1.0, np.finfo(np.float32).max], np.float32)
    assert kernels.encode(values, np.empty_like(values))
    assert not kernels.encode(values, np.empty(2, np.uint16))


def test_adopt_keeps_fp32_where_the_bf16_copy_agrees() -> None:
    w = vector(100, 1)
    copy = bits_of(w)
    copy[::10] += 1
    kept = w.copy()
    kernels.adopt(w, copy)
    changed = np.zeros(100, bool)
    changed[::10] = True
    np.testing.assert_array_equal(w[~changed], kept[~changed])
    np.testing.assert_array_equal(w[changed], wide(copy)[changed])


@pytest.mark.parametrize("n", [0, 1, 63, 1000])
def test_buffers_are_aligned(n: int) -> None:
    for dtype in (np.float32, np.uint16, np.uint8):
        buffer = aligned(n, dtype)
        assert buffer.size == n
        assert n == 0 or buffer.ctypes.data % 64 == 0
        assert len(octets(buffer)) == buffer.nbytes


SPECIAL = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001], np.uint32
)
"""Bits of fp32: zero, the ends of the subnormal and normal numbers, one, what bf16 makes infinite, infinity, NaN."""


def any_values(rng: np.random.Generator, n: int, dtype: str) -> NDArray[Any]:
    """Ordinary values, which are rounded; where `n` is odd also any bits, and special values of either sign."""
    sign = rng.integers(0, 2, n, np.uint32) << 31
    ordinary, bits = rng.standard_normal(n, np.float32).view(np.uint32), rng.integers(0, 2**32, n, np.uint32)
    kinds = rng.integers(0, 3, n) * (n % 2)
    chosen = np.choose(kinds, (ordinary, bits, rng.choice(SPECIAL, n) | sign)).astype(np.uint32)
    return chosen.view(np.float32) if dtype == "float32" else (chosen >> 16).astype(np.uint16)


@pytest.mark.by_day(15)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_compiled_code_equals_its_python_source(name: str, encoding: str) -> None:
    """Bit for bit, for any values; only sign and payload of NaN may differ, and a sum that is made in another order."""
    kernel, rng = KERNELS[name], np.random.default_rng(0)
    for n in [*range(6), *rng.integers(6, 141, 50)]:
        arguments: list[Any] = []
        for parameter in kernel.parameters:
            if parameter.kind == "Sums":
                arguments.append(np.zeros(3))
            elif parameter.is_array:
                arguments.append(any_values(rng, n, parameter.dtype(encoding)))
            else:
                arguments.append(F(rng.choice(np.array([rng.uniform(-2, 2), rng.integers(-2, 3)]))))
        compiled, plain = ([a.copy() for a in arguments] for _ in range(2))
        result = kernel(*compiled)
        with np.errstate(all="ignore"):
            expected = kernel.rule(n, *plain)
        assert result == expected
        for mine, theirs in zip(compiled, plain, strict=True):
            if mine.dtype == np.uint16:
                mine, theirs = wide(mine), wide(theirs)  # noqa: PLW2901
            if kernel.any_order and mine.dtype == np.float64:
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)
            else:
                np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_array_equal(np.signbit(mine[mine == 0]), np.signbit(theirs[theirs == 0]))


def test_kernels_refuse_arrays_that_compiled_code_cannot_use() -> None:
    w, read_only = np.zeros(8, np.float32), np.zeros(8, np.float32)
    read_only.flags.writeable = False
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float32)
    wrong: list[Any] = [np.zeros(7, np.float32), np.zeros(8), np.zeros(16, np.float32)[::2]]
    for bad in (*wrong, read_only, unaligned):
        with pytest.raises(
            TypeError, match=r"w: .* of float32 are needed, contiguous, aligned and writeable"
        ):
            kernels.adopt(bad, w)
    with pytest.raises(TypeError, match="3 of float64 are needed"):
        kernels.squares(w, np.zeros(4))
    with pytest.raises(TypeError, match=r"buffers have values of float32 or uint16, not of float16"):
        kernels.adopt(w, w.astype(np.float16))
    assert kernels.encode(read_only, w)


# --- object code --------------------------------------------------------------------------------------------------

USE = """
import sys, numpy as np
from shoal_trainer.ps import kernels
w = np.ones(3, np.float32)
kernels.sgd(w, np.ones(3, np.float32), 0.25, 0.0)
print(w.tolist(), "numba" in sys.modules)
"""
RESULT = "[0.75, 0.75, 0.75] False"


def start(program: list[str], folder: Path, cwd: Path, **changes: str | None) -> tuple[int, str, str]:
    """Run Python with kernels in `folder`; returns exit code, stdout and stderr."""
    environment = {**os.environ, "SHOAL_KERNELS": str(folder), **changes}
    done = subprocess.run(
        [sys.executable, *program],
        env={name: value for name, value in environment.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.nightly
def test_kernels_are_compiled_once_and_read_without_numba(tmp_path: Path) -> None:
    """As in the image: built for a fixed CPU name, then read by a user who can write nothing."""
    folder = tmp_path / "kernels"
    cpu = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""} if platform.machine() == "x86_64" else {}
    code, _, errors = start(["-m", "shoal_trainer.ps.kernel_loader"], folder, tmp_path, **cpu)
    assert code == 0, errors
    [lock] = folder.glob("*.lock")
    lock.unlink()
    lock.mkdir()  # it can be neither opened nor replaced, even by root
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert start(["-c", USE], folder, tmp_path, **cpu) == (0, RESULT, "")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written

    [stored] = folder.glob("*.o")
    stored.write_bytes(stored.read_bytes()[:-1])  # a damaged file is replaced
    assert start(["-c", USE], folder, tmp_path, **cpu)[:2] == (0, RESULT)
    assert stored.stat().st_mtime_ns != written[stored]


@pytest.mark.parametrize(("machine", "cpu"), [("x86_64", "haswell"), ("aarch64", "neoverse-n1")])
def test_an_images_kernels_are_for_any_node_of_its_architecture(
    monkeypatch: pytest.MonkeyPatch, machine: str, cpu: str
) -> None:
    """One Dockerfile is built for both."""
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv(kernel_loader.FOLDER_ENV, "/nowhere")
    assert kernel_loader.target() == (cpu, "")
    monkeypatch.setenv("NUMBA_CPU_NAME", "znver4")
    assert kernel_loader.target() == ("znver4", "")
    monkeypatch.delenv(kernel_loader.FOLDER_ENV)
    monkeypatch.delenv("NUMBA_CPU_NAME")
    assert kernel_loader.target()[0] == llvm.get_host_cpu_name()


@pytest.mark.nightly
def test_surroundings_do_not_change_the_code(tmp_path: Path) -> None:
    """Neither modules in the current folder, nor variables of Numba that print to stdout or turn off optimization."""
    (tmp_path / "numba.py").write_text("raise ImportError('not this one')")
    loader = ["-P", "-m", "shoal_trainer.ps.kernel_loader"]
    odd = start(loader, tmp_path / "a", tmp_path, NUMBA_OPT="0", NUMBA_DUMP_SSA="1")
    plain = start(loader, tmp_path / "b", tmp_path.parent)
    assert (odd[0], plain[0]) == (0, 0), odd[2] + plain[2]
    [one], [other] = (tmp_path / "a").glob("*.o"), (tmp_path / "b").glob("*.o")
    assert (one.name, one.stat().st_size) == (other.name, other.stat().st_size)


@pytest.mark.nightly
def test_kernels_run_where_nothing_can_be_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, result, _ = start(["-c", USE], file / "folder", tmp_path)
    assert (code, result) == (0, RESULT)
    assert start(["-m", "shoal_trainer.ps.kernel_loader"], file / "folder", tmp_path)[0] == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM accepts any name for other processors")
def test_unknown_processor_is_named(tmp_path: Path) -> None:
    code, _, errors = start(["-c", USE], tmp_path, tmp_path, NUMBA_CPU_NAME="pentium0", NUMBA_CPU_FEATURES="")
    assert code != 0
    assert "UserError: the update kernels cannot be compiled for pentium0: " in errors
