"""A time that is a sum of parts, t = a + sum_j c_j x_j with all parts positive, learned in logarithms.

Used for the time to save a snapshot (size, tensors). The prior knows orders of magnitude only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.sizing.speed.posterior import Floats, Posterior, width_factor

__all__ = ["Additive"]


class Additive:
    """The posterior of the coefficients.

    Args:
        x: (n, d) terms, all > 0.
        log_seconds: (n,) logarithms of what was measured.
        groups: (n,) what must not be split: rows of one model.
        centres: (d + 1,) prior medians of a and the c_j.
        spreads: (d + 1,) standard deviations of their logarithms.
        noise: standard deviation of the logarithm of a group.

    """

    def __init__(
        self,
        x: Floats,
        log_seconds: Floats,
        groups: Sequence[str],
        *,
        centres: Floats,
        spreads: Floats,
        noise: float,
    ) -> None:
        self.noise = noise
        same = np.equal.outer(np.array(groups, dtype=object), np.array(groups, dtype=object))
        # Repeats of one group share its deviation; a little is their own.
        kernel = noise**2 * (0.8 * same + 0.2 * np.eye(len(x))) + 1e-10 * np.eye(len(x))
        self._posterior = Posterior(
            lambda theta: _form(x, theta), log_seconds, kernel, np.log(centres), spreads
        )
        self.factor = 1.0
        if len(x):
            errors, sigmas = self._posterior.held_out(groups)
            self.factor = width_factor(errors / sigmas, list(groups))

    @property
    def coefficients(self) -> Floats:
        """(d + 1,) a and the c_j."""
        return np.asarray(np.exp(self._posterior.theta))

    def predict(self, x: Floats, *, elsewhere: float = 0.0) -> tuple[Floats, Floats]:
        """(m,) mean and standard deviation of the logarithm for another group.

        `elsewhere` is the standard deviation of what another day or place changes for all of them.
        """
        mean, jacobian = _form(x, self._posterior.theta)
        nothing = np.zeros((len(self._posterior.data), len(x)))
        mean, variance, form = self._posterior.predict(
            mean, jacobian, nothing, np.full(len(x), self.noise**2)
        )
        return mean, np.sqrt(self.factor**2 * variance + form + elsewhere**2)


def _form(x: Floats, theta: Floats) -> tuple[Floats, Floats]:
    parts = np.column_stack([np.full(len(x), theta[0]), theta[1:] + np.log(np.maximum(x, 1e-300))])
    top = parts.max(axis=1, keepdims=True)
    whole = top + np.log(np.exp(parts - top).sum(axis=1, keepdims=True))
    return whole[:, 0], np.exp(parts - whole)
