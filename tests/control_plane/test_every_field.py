"""Which changes of a running job the API server admits: by its schema and its CEL rules."""

from __future__ import annotations

from dev.kube import ApiError, Kube
from tests.control_plane.operators import Job
from tests.every_field import BASE, REFUSED, changes


async def test_every_field_can_be_changed_or_is_refused_with_the_words_that_are_expected(
    kube: Kube, namespace: str, crds: None
) -> None:
    job = Job(kube, namespace)
    made = await job.apply(**BASE)
    refused = {}
    for change in changes():
        body = {**made, "spec": change.of(made["spec"])}
        try:
            await kube.request("PUT", job.path, body, params={"dryRun": "All", "fieldValidation": "Strict"})
        except ApiError as error:
            refused[str(change)] = str(error)
    assert refused.keys() == REFUSED.keys(), refused
    for which, words in REFUSED.items():
        assert words in refused[which]
