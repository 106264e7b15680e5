"""Update kernels against memcpy's effective rate, blocked numpy and TensorFlow's own ops, one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Measurement, summary
from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned

SIZES = {"1.7 M": 1_730_000, "25.6 M": 25_600_000, "100 M": 100_000_000}
BLOCK = 65_536
GOAL_MEMCPY = {("momentum", "25.6 M", "fp32"): 1.5}
GOAL_TENSORFLOW = {"momentum": 1.2, "adam": 1.5}
STATE_BYTES = {"sgd": 8, "momentum": 16, "nesterov": 16, "adam": 24, "adamw": 24, "adagrad": 16}
"""Bytes read and written for each parameter in addition to `io`: parameters and state."""

f = np.float32
Step = Callable[[], object]


def _ours(n: int, io: Any) -> dict[str, Step]:
    w, m, v = aligned(n), aligned(n), aligned(n)
    w += 0.1
    v += 1.0
    lr, no, mu = f(1e-3), f(0), f(0.9)
    moments = (f(0.1), f(0.001), f(1e-7))
    return {
        "sgd": lambda: kernels.sgd(w, io, lr, no),
        "momentum": lambda: kernels.momentum(w, m, io, lr, no, mu),
        "nesterov": lambda: kernels.nesterov(w, m, io, lr, no, mu),
        "adam": lambda: kernels.adam(w, m, v, io, lr, no, *moments),
        "adamw": lambda: kernels.adam(w, m, v, io, lr, f(1e-5), *moments),
        "adagrad": lambda: kernels.adagrad(w, v, io, lr, no, f(1e-7)),
    }


def _numpy(n: int, g: Any) -> dict[str, Step]:
    """The fastest plain numpy: in blocks that fit into the cache, without temporaries."""
    w, m, v = aligned(n), aligned(n), aligned(n)
    v += 1.0
    t, u = np.empty(BLOCK, f), np.empty(BLOCK, f)

    def blocks() -> Iterator[tuple[slice, int]]:
        for low in range(0, n, BLOCK):
            high = min(n, low + BLOCK)
            yield slice(low, high), high - low

    def momentum() -> None:
        for part, size in blocks():
            step, state = t[:size], m[part]
            state *= f(0.9)
            np.multiply(g[part], f(1e-3), out=step)
            state -= step
            np.add(w[part], state, out=w[part])

    def adam() -> None:
        for part, size in blocks():
            a, b, first, second, gradient = t[:size], u[:size], m[part], v[part], g[part]
            np.subtract(gradient, first, out=a)
            a *= f(0.1)
            first += a
            np.multiply(gradient, gradient, out=a)
            a -= second
            a *= f(0.001)
            second += a
            np.sqrt(second, out=a)
            a += f(1e-7)
            np.divide(first, a, out=b)
            b *= f(1e-3)
            np.subtract(w[part], b, out=w[part])

    return {"momentum": momentum, "adam": adam}


def _tensorflow(n: int) -> dict[str, Step]:
    """TensorFlow's fused ops, one thread, no locking, as in its parameter server."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        pass
    w, m, v, g = (tf.Variable(tf.fill([n], 0.1)) for _ in range(4))
    gradient = g.read_value()
    lr, mu, b1, b2, eps = (tf.constant(x, tf.float32) for x in (1e-3, 0.9, 0.9, 0.999, 1e-7))
    p1, p2 = tf.constant(0.9), tf.constant(0.999)
    raw = tf.raw_ops
    return {
        "momentum": lambda: raw.ResourceApplyKerasMomentum(
            var=w.handle, accum=m.handle, lr=lr, grad=gradient, momentum=mu
        ),
        "adam": lambda: raw.ResourceApplyAdam(
            var=w.handle,
            m=m.handle,
            v=v.handle,
            beta1_power=p1,
            beta2_power=p2,
            lr=lr,
            beta1=b1,
            beta2=b2,
            epsilon=eps,
            grad=gradient,
        ),
    }


def _rounds(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round. The steps are interleaved, so that noise affects all equally."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return times


def _ratios(base: list[float], mine: list[float], repeats: int, factor: float = 1.0) -> list[float]:
    """`repeats` ratios base/mine, each from the fastest rounds of its share."""
    share = max(1, len(mine) // repeats)
    cuts = range(0, share * repeats, share)
    return [factor * min(base[c : c + share]) / min(mine[c : c + share]) for c in cuts]


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Ratios of effective bytes/s (against memcpy) or of speed (against the others)."""
    repeats = 2 if quick else 5
    for size, n in SIZES.items():
        if quick and n > 30_000_000:
            continue
        rounds = repeats * (4 if n < 30_000_000 else 2)
        source, target = aligned(n), aligned(n)
        for encoding, dtype in (("fp32", f), ("bf16", np.uint16)):
            io = aligned(n, dtype)
            steps: dict[str, Step] = {"memcpy": lambda a=target, b=source: np.copyto(a, b)}  # type: ignore[misc]
            steps |= {f"ours {name}": step for name, step in _ours(n, io).items()}
            if encoding == "fp32":
                steps |= {f"numpy {name}": step for name, step in _numpy(n, source).items()}
                steps |= {f"tensorflow {name}": step for name, step in _tensorflow(n).items()}
            times = _rounds(steps, rounds)
            for name, state in STATE_BYTES.items():
                mine = times[f"ours {name}"]
                # Counted are parameters, state, and the gradient read, but not the answer written.
                effective = (state + io.itemsize) / 8
                label = f"{name} {size} {encoding}"
                yield summary(
                    f"kernel {label} / memcpy",
                    _ratios(times["memcpy"], mine, repeats, effective),
                    "x",
                    "effective bytes/s of memcpy, same run",
                    GOAL_MEMCPY.get((name, size, encoding)),
                )
                for peer in ("numpy", "tensorflow"):
                    if (theirs := times.get(f"{peer} {name}")) is not None:
                        goal = (
                            GOAL_TENSORFLOW.get(name) if peer == "tensorflow" and size == "25.6 M" else None
                        )
                        against = f"{peer} on the same numbers, one thread"
                        yield summary(
                            f"kernel {label} / {peer}", _ratios(theirs, mine, repeats), "x", against, goal
                        )
