"""A status that conflicts again and again tells that the cache is behind."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import JobImages, TrainingJobStatus
from shoal.cluster.cache import Cache
from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.runtime.status_writer import MANY_CONFLICTS, StatusWriter
from tests.unit.policy import build

ABSENT = Answer(404, b'{"reason": "NotFound", "message": "trainingjobs.shoal.dev \\"digits\\" not found"}')
CONFLICT = Answer(409, b'{"reason": "Conflict", "message": "the object has been modified"}')


class Server:
    """Answers each request with the next answer."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    async def request(self, _method: str, _path: str, **_options: Any) -> Answer:
        return self.answers.pop(0)

    def stream(self, path: str, query: Any) -> Any:
        raise NotImplementedError


def at(version: str) -> TrainingJob:
    job = build.job()
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"resource_version": version})})


async def test_the_cache_is_read_again_when_one_version_conflicts_twice() -> None:
    """Chaos: a watch was half-open for 75 s after an edit. Pods were made, and none could be recorded."""
    server, stale = Server(), []
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(server, cache, TrainingJob, on_stale=lambda: stale.append(1))

    async def write(version: str, answer: Answer) -> None:
        server.answers = [answer]
        await writer.write(at(version), at(version).status)

    await write("7", CONFLICT)
    assert stale == []  # somebody was faster: the watch will say so
    await write("8", CONFLICT)
    assert stale == []
    await write("8", CONFLICT)
    assert stale == [1]
    await write("9", Answer(200, at("10").model_dump_json(by_alias=True).encode()))
    await write("10", CONFLICT)
    assert stale == [1]


async def test_the_cache_is_read_again_ever_less_often_where_that_does_not_help() -> None:
    """One object was a list of all of them each second, for ever."""
    server, stale = Server(), []
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(server, cache, TrainingJob, on_stale=lambda: stale.append(1))
    for _ in range(3600):
        server.answers = [CONFLICT]
        await writer.write(at("7"), at("7").status)
    assert len(stale) == 11


async def test_a_version_that_conflicts_many_times_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of such an object was recorded any more, and no line of the log said so."""
    server = Server()
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(server, cache, TrainingJob)

    async def conflict(times: int, version: str) -> None:
        for _ in range(times):
            server.answers = [CONFLICT]
            await writer.write(at(version), at(version).status)

    await conflict(MANY_CONFLICTS - 1, "7")
    assert not caplog.records
    await conflict(100, "7")
    [told] = caplog.records
    assert (
        "the status of team/digits: version 7, as this process knows it, conflicted 16 times" in told.message
    )


async def test_an_object_whose_status_is_not_there_is_listed_again_and_not_dropped() -> None:
    server, stale = Server(), []
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(server, cache, TrainingJob, on_stale=lambda: stale.append(1))
    job = at("7")
    cache.put(job)
    server.answers = [ABSENT, ABSENT]
    assert await writer.write(job, job.status) is None
    assert stale == []  # its watch will say that it is gone
    with pytest.raises(Unavailable, match="cannot update the status of team/digits: 404"):
        await writer.write(job, job.status)
    assert stale == [1]
    assert cache.by_uid(job.metadata.uid) is job


async def test_nothing_is_written_to_an_object_that_cannot_be_read_any_more() -> None:
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(Server(), cache, TrainingJob)
    job = at("7")
    cache.put(job)
    assert cache.leave_unread(job.metadata.uid, 8)
    assert await writer.write(job, job.status) is None
    cache.put(at("9"))
    assert writer.can_write(job)


async def test_what_the_server_does_not_keep_is_known_as_it_was_sent_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An older CRD has not the newest fields of a status: whoever compares with what is stored would write for ever."""
    server, results = Server(), list[str]()
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    writer = StatusWriter(server, cache, TrainingJob, on_result=results.append)
    job = at("7")
    sent = job.status.model_copy(
        update={"images": JobImages(ps="ps:1", worker="w:1", node_selector={"a": "b"})}
    )
    kept = sent.model_copy(update={"images": JobImages(ps="ps:1", worker="w:1")})

    async def write(about: TrainingJob, answer: TrainingJobStatus) -> TrainingJob:
        answered = about.model_copy(update={"status": answer})
        server.answers = [Answer(200, answered.model_dump_json(by_alias=True).encode())]
        stored = await writer.write(about, sent)
        assert stored is not None
        return stored

    assert writer.known(job) is job.status
    pruned = await write(job, kept)
    assert pruned.status == kept
    assert writer.known(pruned) == sent
    other = pruned.model_copy(update={"status": kept.model_copy(update={"reason": "Edited"})})
    assert writer.known(other) == sent.model_copy(update={"reason": "Edited"}), (
        "what another wrote is seen beside it"
    )
    swapped = kept.model_copy(update={"images": JobImages(ps="ps:2", worker="w:1")})
    other = pruned.model_copy(update={"status": swapped})
    assert writer.known(other) == swapped
    again = await write(other, kept)
    assert writer.known(again) == sent
    [said] = [each.getMessage() for each in caplog.records]
    assert said == (
        "the API server does not keep of the status of a TrainingJob: images.nodeSelector. Apply the "
        "CustomResourceDefinitions of this version"
    )
    writer.forget(job.metadata.uid)
    assert writer.known(again) is again.status
    await write(again, kept)
    whole = await write(again, sent)
    assert writer.known(again) is again.status, "a newer CRD keeps it"
    assert writer.known(whole) is whole.status
    assert results == ["cut", "cut", "cut", "written"]
