"""Which changes of a running job the API server admits: by its schema and its CEL rules."""

from __future__ import annotations

import pytest

from dev.kube import ApiError, Kube
from tests.control_plane.operators import Job
from tests.every_field import BASE, POOLED, POOLED_REFUSED, REFUSED, WHEN_SUSPENDED, Change, Json, changes


async def refused_of(job: Job, made: Json, tried: list[Change]) -> dict[str, str]:
    """The words of each refusal."""
    refused = {}
    for change in tried:
        body = {**made, "spec": change.of(made["spec"])}
        try:
            await job.kube.request(
                "PUT", job.path, body, params={"dryRun": "All", "fieldValidation": "Strict"}
            )
        except ApiError as error:
            refused[str(change)] = str(error)
    return refused


@pytest.mark.parametrize(
    ("base", "expected"), [(BASE, REFUSED), (POOLED, POOLED_REFUSED)], ids=["without pools", "with pools"]
)
async def test_every_field_can_be_changed_or_is_refused_with_the_words_that_are_expected(
    kube: Kube, namespace: str, crds: None, base: Json, expected: dict[str, str]
) -> None:
    job = Job(kube, namespace)
    refused = await refused_of(job, await job.apply(**base), changes(base))
    assert refused.keys() == expected.keys(), refused
    for which, words in expected.items():
        assert words in refused[which]


async def test_what_may_change_only_while_a_job_is_suspended_is_refused_while_it_runs(
    kube: Kube, namespace: str, crds: None
) -> None:
    job = Job(kube, namespace)
    refused = await refused_of(job, await job.apply(**BASE), WHEN_SUSPENDED)
    assert set(refused) == {str(change) for change in WHEN_SUSPENDED}
    assert all("can change only while the job is suspended" in words for words in refused.values())
    suspended = await kube.patch(job.path, {"spec": {"suspend": True}})
    assert await refused_of(job, suspended, WHEN_SUSPENDED) == {}
