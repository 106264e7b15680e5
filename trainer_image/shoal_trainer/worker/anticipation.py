"""Where the parameters will be when the gradient of the next step arrives.

A worker whose push overlaps its next step computes on parameters without its own last gradient, and without what the
other workers push meanwhile. A gradient is worth most where it is applied (DANA, arXiv 1907.11612), so

- the servers answer with the parameters some updates *ahead*, as far as the optimizer's velocity tells;
- the worker adds what its own last gradient will do, which it knows exactly. So one worker that overlaps trains as one
  that waits: with SGD and with optimizers that run on the worker to rounding; with Adam up to the change of its second
  moments within one step, which the worker estimates from its own gradients.

Adagrad has neither velocity nor an estimate, so its gradients are one step late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.update_rules import adam_momentum, momentum_at, nadam_parts, normalizes, stretch
from shoal_trainer.wire.messages import OptimizerConfig, Pulled
from shoal_trainer.worker.send import Send

LEAD = 2.0
"""How far to look ahead per update of other workers. More than 1, as the velocity at the pull is itself late."""
EXPONENT = 0.5
"""That of the servers by default, for what a gradient will do beside those of other workers."""


class Anticipation:
    """Follows how stale this worker's gradients are, and adds the one in flight to pulled parameters.

    `trainable` of `size` values are trained; `dtype`: of the parameters that a step takes, of which `alias` makes a
    tensor.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        trainable: int,
        size: int,
        dtype: npt.DTypeLike,
        alias: Callable[[npt.NDArray[Any]], Any],
    ) -> None:
        self._config = config
        self._trainable, self._size = trainable, size
        self._dtype, self._alias = np.dtype(dtype), alias
        self._damping = Damping(EXPONENT, normalizes=normalizes(config))
        self._staleness = 0
        self._second: npt.NDArray[np.float32] | None = None
        self._seen = 0
        self._sum: npt.NDArray[np.float32] | None = None
        """fp32; made with the first gradient in flight: a worker that waits for its answers needs none."""
        self._encoded: npt.NDArray[Any] | None = None
        self._tensor: Any = None

    def answered(self, pulled: Pulled, base: int, *, overlapped: bool) -> None:
        """The answer to a push came. `base`: the version of shard 0 on which its gradient was computed.

        `overlapped`: an earlier gradient of this worker was in flight then.
        """
        self._staleness = pulled.staleness(base)
        self._damping.apply(max(0, self._staleness - overlapped), pulled.live_workers)

    def ahead(self, *, in_flight: bool) -> float:
        """By how many updates the next answer should be ahead. `in_flight`: a gradient of this worker will be, too."""
        return in_flight + LEAD * self._damping.staleness

    def include(self, current: npt.NDArray[Any], send: Send, pulled: Pulled) -> Any:
        """The parameters `current`, as `pulled`, with the push in flight, as a tensor to compute on."""
        if send.local or self._config.name in {"adagrad", "lion"}:
            return None
        if self._sum is None:
            self._prepare()
        assert self._sum is not None
        out, n, start = self._sum, self._trainable, current
        if current.dtype != np.float32:
            kernels.decode(current, out)
            start = out
        self._add(start[:n], send, pulled, out[:n])
        # As the servers add the change of moving statistics.
        scale = np.float32(1 / max(1, self._staleness))
        kernels.include(start[n:], send.update[n:], out[n:], scale)
        if self._encoded is not None:
            kernels.encode(out, self._encoded)
        return self._tensor

    def _add(
        self, w: npt.NDArray[np.float32], send: Send, pulled: Pulled, out: npt.NDArray[np.float32]
    ) -> None:
        c, push, f = self._config, send.push, np.float32
        g = send.update[: self._trainable]
        pace = self._damping.pace(pulled.live_workers)
        rate = push.learning_rate
        if rate is None:
            rate = schedules.learning_rate(c.learning_rate, c.step_after(pulled.samples))
        rate *= c.weight(push.samples) * self._damping.rate(pace)
        steps = self.ahead(in_flight=True)
        if c.name == "delta":
            kernels.include(w, g, out, f(rate))
        elif c.name in {"adam", "adamw", "nadam"}:
            self._seen += 1
            beta, step = adam_momentum(c, pace), pulled.versions[0] + 1
            if c.name == "nadam":
                of_m, of_g = nadam_parts(beta, rate, step)
                rate = of_m * steps * (1 - beta) + of_g
            else:
                rate *= steps * (1 - beta) / (1 - beta**step)
            bias = 1 - c.beta_2**self._seen
            second = self._second_moments()
            kernels.include_adam(w, second, g, out, f(rate), f(1 - c.beta_2), f(bias), f(c.epsilon))
        elif c.name == "rmsprop":
            rate *= steps / stretch(pace) if c.momentum else 1.0
            moments = self._second_moments(), g, out, f(rate)
            kernels.include_rmsprop(w, *moments, f(c.rho), f(1 - c.rho), f(c.epsilon))
        elif c.momentum:
            more = momentum_at(c, pace) if c.nesterov else 0.0
            kernels.include(w, g, out, f(-rate / stretch(pace) * (steps + more)))
        else:
            kernels.include(w, g, out, f(-rate))

    def _second_moments(self) -> npt.NDArray[np.float32]:
        """Those of this worker's own gradients."""
        if self._second is None:
            self._second = aligned(self._trainable)
        return self._second

    def _prepare(self) -> None:
        self._sum = aligned(self._size)
        if self._dtype == np.float32:
            self._tensor = self._alias(self._sum)
        else:
            self._encoded = aligned(self._size, self._dtype)
            self._tensor = self._alias(self._encoded)
