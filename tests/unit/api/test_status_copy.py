"""A copy of a part of a status is what pydantic makes of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import BaseModel

from shoal.api.base import Status
from shoal.api.training_job_status import LastDisruption, Slot, TrainingJobStatus

NOW = datetime(2026, 1, 2, tzinfo=UTC)
PARTS: list[tuple[Status, dict[str, object]]] = [
    (Slot(index=3), {}),
    (Slot(index=3, node="a"), {"node": "b", "created_at": NOW}),
    (TrainingJobStatus(slots=(Slot(index=1),)), {"phase": "Running"}),
    (LastDisruption(pod="p", reason="r", time=NOW), {"recovered_seconds": 3}),
]


@pytest.mark.parametrize(("part", "update"), PARTS)
@pytest.mark.parametrize("deep", [False, True])
def test_copy_is_pydantics(part: Status, update: dict[str, object], deep: bool) -> None:
    before = part.model_dump()
    fresh, theirs = (
        part.model_copy(update=update, deep=deep),
        BaseModel.model_copy(part, update=update, deep=deep),
    )
    assert fresh == theirs
    assert type(fresh) is type(part)
    assert fresh.model_dump_json(by_alias=True) == theirs.model_dump_json(by_alias=True)
    assert fresh.model_fields_set == theirs.model_fields_set
    assert part.model_dump() == before
    assert fresh.model_copy() == fresh
