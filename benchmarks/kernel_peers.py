"""The peers of the update kernels: blocked numpy and TensorFlow's own ops, one thread, with fp32 or bf16 gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal_trainer.ps.aligned import aligned

BLOCK = 65_536
RATE, MU, DECAY, EPSILON = 1e-3, 0.9, 1e-5, 1e-7
BETAS = (0.9, 0.999)

f = np.float32
Step = Callable[[], object]


def _sgd(w: Any, _m: Any, _v: Any, g: Any, t: Any, _u: Any) -> None:
    np.multiply(g, f(RATE), out=t)
    w -= t


def _momentum(w: Any, m: Any, _v: Any, g: Any, t: Any, _u: Any) -> None:
    m *= f(MU)
    np.multiply(g, f(RATE), out=t)
    m -= t
    w += m


def _nesterov(w: Any, m: Any, _v: Any, g: Any, t: Any, u: Any) -> None:
    m *= f(MU)
    np.multiply(g, f(RATE), out=t)
    m -= t
    np.multiply(m, f(MU), out=u)
    u -= t
    w += u


def _adam(w: Any, m: Any, v: Any, g: Any, t: Any, u: Any) -> None:
    """Adam without bias correction, which is a factor of the rate."""
    np.subtract(g, m, out=t)
    t *= f(1 - BETAS[0])
    m += t
    np.multiply(g, g, out=t)
    t -= v
    t *= f(1 - BETAS[1])
    v += t
    np.sqrt(v, out=t)
    t += f(EPSILON)
    np.divide(m, t, out=u)
    u *= f(RATE)
    w -= u


def _adamw(w: Any, m: Any, v: Any, g: Any, t: Any, u: Any) -> None:
    w *= f(1 - DECAY)
    _adam(w, m, v, g, t, u)


def _adagrad(w: Any, _m: Any, v: Any, g: Any, t: Any, u: Any) -> None:
    np.multiply(g, g, out=t)
    v += t
    np.add(v, f(EPSILON), out=t)
    np.sqrt(t, out=t)
    np.multiply(g, f(RATE), out=u)
    u /= t
    w -= u


class Blocked:
    """The fastest plain numpy: in blocks that fit into the cache, without temporaries.

    `gradient`: in fp32, or the bits of bf16, which are widened block by block.
    """

    def __init__(self, gradient: Any) -> None:
        self._gradient = gradient
        self.w, self.m, self.v = (aligned(len(gradient)) for _ in range(3))
        self.w += f(0.1)
        self.v += f(1)
        self._wide = np.empty(BLOCK, np.uint32)
        self._t, self._u = np.empty(BLOCK, f), np.empty(BLOCK, f)

    def steps(self) -> dict[str, Step]:
        """The updates by name."""
        rules = {
            "sgd": _sgd,
            "momentum": _momentum,
            "nesterov": _nesterov,
            "adam": _adam,
            "adamw": _adamw,
            "adagrad": _adagrad,
        }
        return {name: partial(self._update, rule) for name, rule in rules.items()}

    def _update(self, rule: Callable[..., None]) -> None:
        for low in range(0, len(self.w), BLOCK):
            part = slice(low, low + BLOCK)
            g = self._gradient[part]
            size = len(g)
            if g.dtype != f:
                wide = self._wide[:size]
                wide[:] = g
                wide <<= np.uint32(16)
                g = wide.view(f)
            rule(self.w[part], self.m[part], self.v[part], g, self._t[:size], self._u[:size])


def one_thread() -> None:
    """Make TensorFlow use one thread; it must not have started."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


class TensorFlow:
    """TensorFlow's fused ops without locking, as in its parameter server; it has none for AdamW.

    The ops take a gradient of the type of the parameters: one in bf16 is cast first.
    """

    def __init__(self, g: Any) -> None:
        import tensorflow as tf

        self.w, self.m = tf.Variable(tf.fill([len(g)], 0.1)), tf.Variable(tf.zeros([len(g)]))
        self.v = tf.Variable(tf.ones([len(g)]))
        gradient = tf.constant(g)
        half = None if g.dtype == f else tf.bitcast(gradient, tf.bfloat16)
        self._gradient: Callable[[], Any] = lambda: gradient if half is None else tf.cast(half, tf.float32)

    def steps(self) -> dict[str, Step]:
        """The updates by name."""
        import tensorflow as tf

        raw: Any = tf.raw_ops
        gradient, w, m, v = self._gradient, self.w.handle, self.m.handle, self.v.handle
        lr, mu, b1, b2, epsilon, no = (tf.constant(x, tf.float32) for x in (RATE, MU, *BETAS, EPSILON, 0.0))
        adam = {"beta1_power": no, "beta2_power": no, "beta1": b1, "beta2": b2, "epsilon": epsilon}

        def momentum(nesterov: bool) -> None:
            raw.ResourceApplyKerasMomentum(
                var=w, accum=m, lr=lr, grad=gradient(), momentum=mu, use_nesterov=nesterov
            )

        return {
            "sgd": lambda: raw.ResourceApplyGradientDescent(var=w, alpha=lr, delta=gradient()),
            "momentum": partial(momentum, False),
            "nesterov": partial(momentum, True),
            "adam": lambda: raw.ResourceApplyAdam(var=w, m=m, v=v, lr=lr, grad=gradient(), **adam),
            "adagrad": lambda: raw.ResourceApplyAdagradV2(
                var=w, accum=v, lr=lr, epsilon=epsilon, grad=gradient()
            ),
        }

    def steps_with_read(self, out: Any) -> dict[str, Step]:
        """The updates by name, each with a copy of the new parameters to `out`."""

        def read() -> None:
            np.copyto(out, np.asarray(memoryview(self.w.read_value())))

        def both(step: Step) -> None:
            step()
            read()

        return {name: partial(both, step) for name, step in self.steps().items()}
