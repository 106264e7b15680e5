"""Every bottleneck is named, with the speed after fixing it."""

import pytest

from shoal.errors import UsageError
from shoal.sizing.predict.bottleneck import Bottleneck, Observation, WorkerParts, diagnose


def workers(n: int = 4, **changes: float) -> list[WorkerParts]:
    parts = {"step_seconds": 0.2, "compute_seconds": 0.18, "exchange_seconds": 0.02} | changes
    return [WorkerParts(f"w{i}", "T4", **parts) for i in range(n)]


def test_job_at_predicted_speed_has_no_bottleneck() -> None:
    found = diagnose(Observation(workers(), predicted=20.5, relative_error=0.1))
    assert found.bottleneck is Bottleneck.NONE
    assert found.gain == 0


@pytest.mark.parametrize(
    ("cpu", "network", "which"), [(0.97, 0.3, Bottleneck.PS_CPU), (0.4, 0.95, Bottleneck.PS_NETWORK)]
)
def test_busy_parameter_servers_are_named(cpu: float, network: float, which: Bottleneck) -> None:
    slow = workers(8, step_seconds=0.4, exchange_seconds=0.22)
    found = diagnose(
        Observation(slow, 40, 0.1, parameter_servers=2, ps_cpu_busy=cpu, ps_network_busy=network)
    )
    assert found.bottleneck is which
    assert "run 3 parameter servers" in found.advice
    assert 0.2 < found.gain <= 0.6


def test_input_wait_advice_depends_on_cpu_utilization() -> None:
    slow = {"step_seconds": 0.3, "input_seconds": 0.1, "compute_seconds": 0.18}
    idle = diagnose(Observation(workers(4, **slow, cpu_busy=0.2), 20, 0.1))
    assert idle.bottleneck is Bottleneck.INPUT
    assert idle.after == pytest.approx(20)
    busy = diagnose(Observation(workers(4, **slow, cpu_busy=0.98, cpu_cores=4), 20, 0.1))
    assert busy.bottleneck is Bottleneck.CPU_CORES
    assert "about 6 CPU cores" in busy.advice


def test_straggler_is_named() -> None:
    slow = WorkerParts("w9", "T4", 0.42, 0.4, 0.02)
    found = diagnose(Observation([*workers(), slow], 25, 0.05))
    assert (found.bottleneck, found.workers) == (Bottleneck.STRAGGLER, ("w9",))
    assert found.after == pytest.approx(25)
    assert "w9" in found.reason


def test_slower_accelerator_is_not_a_straggler() -> None:
    fast = [WorkerParts(f"a{i}", "A100", 0.05, 0.04) for i in range(3)]
    assert diagnose(Observation([*workers(), *fast], 80, 0.05)).bottleneck is Bottleneck.NONE


def test_unexplained_gap_is_reported() -> None:
    assert diagnose(Observation(workers(), 30, 0.1)).bottleneck is Bottleneck.UNKNOWN
    assert diagnose(Observation(workers(), 30, 0.5)).bottleneck is Bottleneck.NONE
    assert "too early" in diagnose(Observation(workers(), 30, 0.1, warmed_up_seconds=5)).reason


def test_missing_workers_or_warm_up_are_reported() -> None:
    with pytest.raises(UsageError, match="no worker"):
        diagnose(Observation([], 1, 0.1))
    with pytest.raises(UsageError, match="positive"):
        diagnose(Observation(workers(1, step_seconds=0.0), 1, 0.1))
