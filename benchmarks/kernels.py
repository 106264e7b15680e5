"""Update kernels against memcpy's effective rate, blocked numpy and TensorFlow's own ops, one thread.

Times are those of the processor, since other processes take turns with this one.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Measurement, summary
from benchmarks.kernel_peers import BETAS, DECAY, EPSILON, MU, RATE, Blocked, Step, TensorFlow, f, one_thread
from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned

SIZES = {"1.7 M": 1_730_000, "25.6 M": 25_600_000, "100 M": 100_000_000}
ENCODINGS: dict[str, Any] = {"fp32": f, "bf16": np.uint16}
GOAL_SIZE = "25.6 M"
GOALS = {("momentum", "memcpy"): 1.5, ("momentum", "tensorflow"): 1.2, ("adam", "tensorflow"): 1.5}
"""For both encodings."""
STATE_BYTES = {"sgd": 8, "momentum": 16, "nesterov": 16, "adam": 24, "adamw": 24, "adagrad": 16}
"""Bytes read and written for each parameter in addition to `io`: parameters and state."""
WITH_READ = "tensorflow with a read"
"""TensorFlow's op does not answer: its server reads the variable afterwards."""
PEERS: dict[str, Callable[[Any], Blocked | TensorFlow]] = {"numpy": Blocked, "tensorflow": TensorFlow}
CALLS = 10_000


def table(measured: Sequence[Measurement]) -> str:
    """A row for each update, size and encoding, a column for each peer: the name of a figure is `kernel ROW / PEER`."""
    rows: dict[str, dict[str, str]] = {}
    for each in measured[1:]:
        row, _, peer = each.name.removeprefix("kernel ").partition(" / ")
        cell = f"{each.value:.3g} ({each.low:.3g}-{each.high:.3g})"
        goal = "" if each.goal is None else f" ≥ {each.goal:g}: {'met' if each.met else '**missed**'}"
        rows.setdefault(row, {})[peer] = cell + goal
    peers = {
        each.name.partition(" / ")[2]: each.against.partition(", which casts")[0] for each in measured[1:]
    }
    call = measured[0]
    lines = [
        f"A call of sgd with 10 values takes {call.value:.3g} {call.unit} ({call.against}). The figures are ratios to",
        "",
        *(f"- **{peer}**: {against}" for peer, against in peers.items()),
        "",
        "Gradients in bf16 are cast to fp32 first by numpy and TensorFlow.",
        "",
        f"| | {' | '.join(peers)} |",
        f"|---|{'---|' * len(peers)}",
        *(f"| {row} | {' | '.join(cells.get(peer, '') for peer in peers)} |" for row, cells in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def ours(w: Any, m: Any, v: Any, io: Any) -> dict[str, Step]:
    """The updates by name."""
    lr, no, mu, epsilon = f(RATE), f(0), f(MU), f(EPSILON)
    moments = (f(1 - BETAS[0]), f(1 - BETAS[1]), epsilon, no)
    return {
        "sgd": lambda: kernels.sgd(w, io, lr, no),
        "momentum": lambda: kernels.momentum(w, m, io, lr, no, mu, no),
        "nesterov": lambda: kernels.nesterov(w, m, io, lr, no, mu, no),
        "adam": lambda: kernels.adam(w, m, v, io, lr, no, *moments),
        "adamw": lambda: kernels.adam(w, m, v, io, lr, f(DECAY), *moments),
        "adagrad": lambda: kernels.adagrad(w, v, io, lr, no, epsilon),
    }


def _rounds(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round. The steps are interleaved, so that noise affects all equally."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    return times


def _ratios(base: list[float], mine: list[float], repeats: int, factor: float = 1.0) -> list[float]:
    """`repeats` ratios base/mine, each from the fastest rounds of its share."""
    share = max(1, len(mine) // repeats)
    cuts = range(0, share * repeats, share)
    return [factor * min(base[c : c + share]) / min(mine[c : c + share]) for c in cuts]


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Ratios of effective bytes/s (against memcpy) or of speed (against the others), and the time of a call."""
    one_thread()
    repeats = 2 if quick else 5
    yield _call(repeats)
    for size, n in list(SIZES.items())[: 1 if quick else None]:
        rounds = repeats * (4 if n < 30_000_000 else 2)
        for encoding in ENCODINGS:
            times = _times(n, encoding, rounds)
            for name in STATE_BYTES:
                yield from _rows(name, size, encoding, times, repeats)


def _call(repeats: int) -> Measurement:
    w, io = aligned(10), aligned(10)

    def microseconds(step: Step) -> list[float]:
        step()
        return [
            t / CALLS * 1e6
            for t in timeit.repeat(step, timer=time.process_time, number=CALLS, repeat=repeats)
        ]

    base = min(microseconds(lambda: np.add(w, io, out=w)))
    mine = microseconds(ours(w, w, w, io)["sgd"])
    return summary("kernel sgd, 10 values, a call", mine, "µs", f"numpy's in-place add: {base:.2f} µs")


def _times(n: int, encoding: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of memcpy, of our kernels and of their peers: one list for each."""
    w, m, v, source, target = (aligned(n) for _ in range(5))
    w += 0.1
    v += 1.0
    steps: dict[str, Step] = {
        "memcpy": lambda: np.copyto(target, source),
        "in place": lambda: np.multiply(target, f(1), out=target),
    }
    dtype = ENCODINGS[encoding]
    gradient, io = aligned(n, dtype), aligned(n, dtype)
    kernels.encode(w, gradient)
    kernels.encode(w, io)
    steps |= {f"ours {name}": step for name, step in ours(w, m, v, io).items()}
    for peer, kind in PEERS.items():
        made = kind(gradient)
        steps |= {f"{peer} {name}": step for name, step in made.steps().items()}
        if isinstance(made, TensorFlow):
            steps |= {f"{WITH_READ} {name}": step for name, step in made.steps_with_read(target).items()}
    return _rounds(steps, rounds)


def _rows(
    name: str, size: str, encoding: str, times: dict[str, list[float]], repeats: int
) -> Iterator[Measurement]:
    mine, label = times[f"ours {name}"], f"kernel {name} {size} {encoding}"
    # memcpy reads and writes 8 bytes per value, and so does a multiplication in place. Counted beside the former are
    # parameters, state, and the gradient read, but not the answer written.
    width = np.dtype(ENCODINGS[encoding]).itemsize
    cast = ", which casts the gradient to fp32 first" if encoding == "bf16" else ""
    for peer, against, factor in (
        ("memcpy", "effective bytes/s of memcpy, same run", (STATE_BYTES[name] + width) / 8),
        (
            "in place",
            "bytes/s of a multiplication in place of an array as long, same run",
            (STATE_BYTES[name] + 2 * width) / 8,
        ),
        ("numpy", f"numpy on the same numbers, one thread{cast}", 1.0),
        ("tensorflow", f"TensorFlow's op on the same numbers, one thread{cast}", 1.0),
        (WITH_READ, "TensorFlow's op, then a copy of the variable to an answer, as for a worker's pull", 1.0),
    ):
        theirs = times.get(peer if peer in ("memcpy", "in place") else f"{peer} {name}")
        if theirs is not None:  # TensorFlow has no op for AdamW
            goal = GOALS.get((name, peer)) if size == GOAL_SIZE else None
            yield summary(f"{label} / {peer}", _ratios(theirs, mine, repeats, factor), "x", against, goal)
