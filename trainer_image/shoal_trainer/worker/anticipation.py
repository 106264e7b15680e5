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

from typing import Any

import numpy as np

from shoal_trainer.ps import schedules
from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.update_rules import adam_momentum, fill, filled_by, momentum_at, nadam_parts, stretch
from shoal_trainer.wire.header import MAX_AHEAD
from shoal_trainer.wire.messages import OptimizerConfig, Pulled
from shoal_trainer.worker.send import Send
from shoal_trainer.worker.vector import Inclusion, Lead

LEAD = 2.0
"""How far to look ahead per update of other workers. More than 1, as the velocity at the pull is itself late."""


class Anticipation:
    """Follows how stale this worker's gradients are, and adds the one in flight to pulled parameters.

    `inclusion` applies to parameters, of which `trainable` are trained, what an update will do.
    """

    def __init__(self, config: OptimizerConfig, trainable: int, inclusion: Inclusion) -> None:
        self._config = config
        self._trainable, self._inclusion = trainable, inclusion
        self._damping = Damping()
        self._staleness = 0
        self._seen = 0

    def answered(self, pulled: Pulled, base: int, *, overlapped: bool) -> None:
        """The answer to a push came. `base`: the version of shard 0 on which its gradient was computed.

        `overlapped`: an earlier gradient of this worker was in flight then.
        """
        self._staleness = pulled.staleness(base)
        self._damping.apply(max(0, self._staleness - overlapped), pulled.live_workers)

    def ahead(self, *, in_flight: bool) -> float:
        """By how many updates the next answer should be ahead. `in_flight`: a gradient of this worker will be, too."""
        return min(in_flight + LEAD * self._damping.staleness, MAX_AHEAD)

    def include(self, current: Any, send: Send, pulled: Pulled) -> Any:
        """The parameters `current`, a tensor, as `pulled`, with what the push in flight will do: to compute on."""
        if send.local or send.push.meta.skipped or self._config.name in {"adagrad", "lion"}:
            return current
        kind, scale, *rest = self._lead(send, pulled)
        # As the servers weigh the differences of statistics.
        scalars = scale, 1 / max(1, self._staleness), *rest
        lead = Lead(kind, self._trainable, tuple(map(np.float32, scalars)))
        return self._inclusion(current, send.update, lead)

    def _lead(self, send: Send, pulled: Pulled) -> tuple[Any, ...]:
        """The kind of a `Lead`, its scale, and its other scalars."""
        c, meta = self._config, send.push.meta
        pace = self._damping.pace(pulled.live_workers)
        rate = meta.learning_rate
        if rate is None:
            rate = schedules.learning_rate(c.learning_rate, c.step_after(pulled.samples))
        rate *= c.weight(meta.samples) * pulled.answers[0].factor
        steps = self.ahead(in_flight=True)
        if c.name == "delta":
            return "plain", rate
        if c.name in {"adam", "adamw", "nadam"}:
            self._seen += 1
            beta, step = adam_momentum(c, pace), pulled.versions[0] + 1
            filled = fill(pulled.filled or filled_by(beta, pulled.versions[0]), beta)
            if c.name == "nadam":
                of_m, of_g = nadam_parts(beta, rate, step, filled)
                rate = of_m * steps * (1 - beta) + of_g
            else:
                rate *= steps * (1 - beta) / filled
            return "adam", rate, 1 - c.beta_2, 1 - c.beta_2**self._seen, c.epsilon
        if c.name == "rmsprop":
            rate *= steps / stretch(pace) if c.momentum else 1.0
            return "rmsprop", rate, c.rho, 1 - c.rho, c.epsilon
        if c.momentum:
            more = momentum_at(c, pace) if c.nesterov else 0.0
            rate *= (steps + more) / stretch(pace)
        return "plain", -rate
