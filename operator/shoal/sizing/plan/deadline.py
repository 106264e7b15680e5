"""The safety rule: could on-demand nodes alone still keep the deadline, if all spot nodes were lost now?

Whoever counts on spot nodes asks it: the operator, each time that it plans (`fleet/problems.py`), and the policies that
are simulated, at every step (`simulate/policies.py`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["spare_seconds"]


def spare_seconds(training: Any, *, wait: Any, left: Any) -> Any:
    """The seconds that are to spare before the deadline; while they are not negative, it is safe. Numbers or arrays.

    Args:
        training: seconds that the work left takes with all on-demand workers that the job may have.
        wait: mean seconds until they work: 0 for one that does.
        left: seconds to the deadline.

    """
    return left - wait - training
