"""A status that conflicts again and again tells that the cache is behind."""

from __future__ import annotations

from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.transport import Answer
from shoal.runtime.status_writer import StatusWriter
from tests.unit.policy import build

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
