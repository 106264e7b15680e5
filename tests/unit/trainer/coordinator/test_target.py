"""What ends a job at a metric's value."""

import math

import pytest
from pydantic import ValidationError

from shoal_trainer.contract import StopAfter


@pytest.mark.parametrize(
    "said",
    [
        '{"metric": "accuracy", "value": null}',
        '{"metric": "accuracy", "value": 1e999}',
        '{"metric": "accuracy"}',
        '{"value": 0.9}',
    ],
)
def test_a_target_that_could_never_be_reached_is_refused(said):
    with pytest.raises(ValidationError, match=r"go together|finite"):
        StopAfter.model_validate_json(said)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_is_finite(value):
    with pytest.raises(ValidationError, match="finite"):
        StopAfter(metric="accuracy", value=value)
