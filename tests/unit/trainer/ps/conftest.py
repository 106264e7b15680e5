"""The kernels are compiled (or read from the cache) once, so that no test's clock runs meanwhile."""

from __future__ import annotations

import pytest

from shoal_trainer.ps import kernels


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    for _ in kernels.compile_all():
        pass
