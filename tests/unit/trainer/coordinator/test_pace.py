"""The rate of samples over the last seconds."""

from shoal_trainer.coordinator.pace import RATE_SECONDS, Pace


def test_pace_discards_old_pushes_without_being_read():
    pace = Pace()
    for second in range(10_000):
        pace.pushed(float(second), 32, 0.5)
    assert len(pace._recent) == RATE_SECONDS + 1
    assert pace.samples_per_second(9_999.0) == 32 * (RATE_SECONDS + 1) / RATE_SECONDS
