"""Regression in logarithms: a form with few coefficients around a prior, and a Gaussian process for what it misses.

    y = f(theta) + g + noise,   theta ~ N(prior, spread^2),   g ~ GP(0, kernel)

The coefficients are the maximum of the posterior (Gauss-Newton with damping), their covariance is Laplace's; the
process is exact given them (universal kriging). The variance of a prediction grows with the distance from what was
measured, in both parts. `held_out` repeats the fit without each group in closed form, which says how far the stated
width is from the errors that were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.speed import priors

__all__ = ["MOST_ROUNDS", "Floats", "Posterior", "looseness", "width_factor"]

Floats = NDArray[np.float64]
Form = Callable[[Floats], tuple[Floats, Floats]]
"""theta (p,) -> mean (n,) and derivatives (n, p)."""

MOST_ITERATIONS = 60
ODD = 3.0
"""A group that deviates by more standard deviations is one of a kind."""
MOST_ROUNDS = 3
"""In which it is found what is: those that are mislead the others until they are loosened."""
FEWEST, PRIOR_GROUPS = 5, 1.0


class Posterior:
    """The fit. `kernel` (n, n) is the covariance of the process and the noise together."""

    def __init__(self, form: Form, y: Floats, kernel: Floats, prior: Floats, spread: Floats) -> None:
        self._prior, self._precision = prior, 1 / spread**2
        self.theta, self.covariance = prior.copy(), np.diag(spread**2)
        self._white: Floats = np.zeros((0, 0))  # the inverse of the kernel's Cholesky root
        self.data = y
        if len(y) == 0:
            return
        self._white = np.asarray(np.linalg.inv(np.linalg.cholesky(kernel)), dtype=np.float64)
        self.theta = self._maximum(form, y)
        mean, jacobian = form(self.theta)
        self._J = np.asarray(self._white @ jacobian)
        self._r = np.asarray(self._white @ (y - mean))
        self.covariance = np.asarray(np.linalg.inv(self._J.T @ self._J + np.diag(self._precision)))

    def predict(
        self, mean: Floats, jacobian: Floats, cross: Floats, variance: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """(m,) mean, variance of the process, and variance from the coefficients.

        From the form there, its covariance (n, m) with the data, and its own variance.
        """
        if len(self._white):
            across = self._white @ cross
            mean = mean + across.T @ self._r
            variance = variance - (across**2).sum(axis=0)
            jacobian = jacobian - across.T @ self._J
        spread = np.einsum("ij,jk,ik->i", jacobian, self.covariance, jacobian)
        return mean, np.maximum(variance, 1e-8), spread

    def held_out(self, groups: Sequence[str]) -> tuple[Floats, Floats]:
        """(n,) errors of the predictions from the other groups, and their standard deviations (linearized)."""
        # In whitened coordinates the data are J theta + e, with covariance 1 + J P J'; Woodbury gives its inverse.
        residual = self._r + self._J @ (self.theta - self._prior)
        inverse = np.eye(len(residual)) - self._J @ self.covariance @ self._J.T
        weighted = self._white.T @ (inverse @ residual)
        inverse = self._white.T @ inverse @ self._white
        names = np.array(groups, dtype=object)
        errors, sigmas = np.empty(len(names)), np.empty(len(names))
        for name in dict.fromkeys(groups):
            at = np.flatnonzero(names == name)
            covariance = np.linalg.inv(inverse[np.ix_(at, at)])
            errors[at], sigmas[at] = covariance @ weighted[at], np.sqrt(np.diag(covariance))
        return errors, sigmas

    def _maximum(self, form: Form, y: Floats) -> Floats:
        theta, damping = self._prior.copy(), 1e-3
        loss = self._loss(form, y, theta)
        for _ in range(MOST_ITERATIONS):
            mean, jacobian = form(theta)
            J = self._white @ jacobian
            r = self._white @ (y - mean)
            H = J.T @ J + np.diag(self._precision)
            downhill = J.T @ r - self._precision * (theta - self._prior)
            step = np.linalg.solve(H + damping * np.diag(np.diag(H)), downhill)
            tried = self._loss(form, y, theta + step)
            if not tried <= loss:
                damping *= 10
                if damping > 1e8:
                    break
                continue
            theta, done = theta + step, loss - tried < 1e-9 * (1 + loss)
            loss, damping = tried, max(damping / 10, 1e-9)
            if done:
                break
        return theta

    def _loss(self, form: Form, y: Floats, theta: Floats) -> float:
        r = self._white @ (y - form(theta)[0])
        return float(r @ r + self._precision @ (theta - self._prior) ** 2)


def looseness(errors: Floats, variances: Floats, own: float) -> float:
    """How many times larger than usual (`own`) the effect of a group is taken to be, from its errors when held out.

    One that the others do not explain is one of a kind: its effect is as large as it deviates. So it teaches the others
    little, whether it is odd, wrong or made up, and they do not move what was measured of it.
    """
    error, sigma = abs(float(np.mean(errors))), math.sqrt(max(float(np.mean(variances)), 0.0))
    return max(error / own, 1.0) if error > ODD * sigma else 1.0


def width_factor(errors: Floats, groups: Sequence[str]) -> float:
    """By what factor intervals must be wider (or narrower) for 90 % of the groups' errors to be inside.

    `errors` are those of `Posterior.held_out`, in their standard deviations. Every group counts once; few groups leave
    the factor near 1.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < FEWEST:
        return 1.0
    count = {
        name: groups.count(name) if isinstance(groups, list) else list(groups).count(name) for name in names
    }
    weight = np.array([1 / count[name] for name in groups])
    order = np.argsort(np.abs(errors))
    reached = np.cumsum(weight[order]) - weight[order] / 2
    quantile = float(np.interp(0.9 * len(names), reached, np.abs(errors)[order]))
    kept = len(names) / (len(names) + PRIOR_GROUPS)
    return float(np.clip((max(quantile, 1e-3) / priors.Z90) ** kept, 0.5, 3.0))
