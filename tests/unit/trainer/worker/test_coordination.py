"""The uploads of a task's files, and the messages in heartbeats."""

import queue
from dataclasses import replace
from typing import ClassVar

import pytest

from shoal_trainer import Files, UserError
from shoal_trainer.contract import Outcome, TerminationMessage
from shoal_trainer.coordinator.artefacts import Artefacts, ModelManifest
from shoal_trainer.coordinator.protocol import MAX_TEXT, Alive, Assignment, Joined, UnsentFiles
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable
from shoal_trainer.security import create_secret_dir
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.worker import coordination
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.work import About, TaskWork, Wasted
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.worker.models import job


class Client:
    """A `CoordinatorClient` without a network; the calls numbered in `lost` arrive but get no answer."""

    identity: ClassVar = {"slot": 0, "incarnation": 0}

    def __init__(self, artefacts):
        self.artefacts = artefacts
        self.kind = "callbacks"
        self.uploads = []
        self.calls = 0
        self.finished = False
        self.lost = set()
        self.beats, self.counted = queue.Queue(), queue.Queue()
        self.count_flops = False

    def join(self, *_, **__):
        return Joined()

    def next_work(self, generation, stopped):
        self.asked = generation, stopped
        return Assignment(kind="idle")

    def heartbeat(self, beat):
        self.beats.put(beat.message)
        if beat.flops_per_sample is not None:
            self.counted.put(beat.flops_per_sample)
        return Alive(finished=self.finished, count_flops=self.count_flops)

    def close(self):
        pass

    def upload(self, token, name, path):
        self.artefacts.receive(token, self.kind, name, iter([path.read_bytes()]))
        self.uploads.append(name)
        self._answer()

    def send(self, request):
        if isinstance(request, UnsentFiles):
            raise ProtocolError("of a version that does not know it")
        self.artefacts.check(request.token, request.files)
        self._answer()

    def _answer(self):
        self.calls += 1
        if self.calls in self.lost:
            raise Unreachable("the answer is lost")


class Bench:
    def __init__(self, tmp_path):
        self.storage = LocalStorage(tmp_path / "run")
        self.artefacts = Artefacts(self.storage, "uid")
        self.folder = tmp_path / "callbacks"
        self.folder.mkdir()
        self.credentials = create_secret_dir(tmp_path / "secret")

    def worker(self, slot=0, **options):
        config = pod_config(index=slot, batch_size=16)
        plane = ControlPlane(config, self.credentials, replace(job(), **options))
        plane._client.close()
        plane._client = Client(self.artefacts)
        return plane

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def files(self):
        return {f"logs/{path.name}": path for path in sorted(self.folder.iterdir())}

    def stored(self):
        return {name: self.storage.read(f"logs/{name}").decode() for name in self.storage.names("logs")}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def give_back(plane, work, files):
    """Repeat until the call is answered, as a worker does."""
    while True:
        try:
            return plane.task_done(work, {}, files, stop=False, message="")
        except Unreachable:
            continue


def test_each_pass_uploads_new_and_changed_files(bench):
    plane, expected = bench.worker(), {}
    for n in range(5):
        expected |= {f"{n}.h5": f"weights {n}", "log.csv": "row\n" * (n + 1)}
        bench.write(f"{n}.h5", expected[f"{n}.h5"])
        bench.write("log.csv", expected["log.csv"])
        plane._client.uploads.clear()
        plane.task_done(TaskWork((0, n), "callbacks", n), {}, bench.files(), stop=False, message="")
        assert plane._client.uploads == [f"logs/{n}.h5", "logs/log.csv"]
        assert bench.stored() == expected


@pytest.mark.parametrize(
    ("lost", "uploads"), [({1}, "aabc"), ({2}, "abbc"), ({4}, "abc"), ({1, 2, 4}, "aaabbc")]
)
def test_only_unanswered_uploads_are_sent_again(bench, lost, uploads):
    plane = bench.worker()
    plane._client.lost = lost
    for name in ("a", "b", "c"):
        bench.write(name, name)
    give_back(plane, TaskWork((0, 1), "callbacks"), bench.files())
    assert bench.stored() == {"a": "a", "b": "b", "c": "c"}
    assert plane._client.uploads == [f"logs/{name}" for name in uploads]


def test_second_worker_uploads_all_its_files(bench):
    first, second = bench.worker(), bench.worker(1)
    for name in ("a", "b", "c"):
        bench.write(name, "of the first")
    first._client.lost = {2}
    with pytest.raises(Unreachable):
        first.task_done(TaskWork((0, 1), "callbacks"), {}, bench.files(), stop=False, message="")
    for name in ("b", "c", "d"):
        bench.write(name, "of the second")
    files = {name: path for name, path in bench.files().items() if name != "logs/a"}
    second.task_done(TaskWork((0, 2), "callbacks"), {}, files, stop=False, message="")
    assert bench.stored() == {"a": "of the first"} | dict.fromkeys("bcd", "of the second")


def test_model_is_uploaded_whole_for_each_token(bench):
    plane = bench.worker()
    plane._client.kind = "export"
    plane._client.lost = {2}
    bench.write("model.keras", "a model")
    files = {path.name: path for path in bench.folder.iterdir()}
    with pytest.raises(Unreachable):
        plane.task_done(TaskWork((0, 1), "export"), {}, files, stop=False, message="")
    plane.task_done(TaskWork((0, 2), "export"), {}, files, stop=False, message="")
    bench.artefacts.publish_model((0, 2), TerminationMessage(outcome=Outcome.SUCCEEDED))
    manifest = ModelManifest.model_validate_json(bench.storage.read("model/manifest.json"))
    assert [file.name for file in manifest.files] == ["model.keras"]


def test_files_of_a_model_stand_while_the_storage_refuses_its_manifest(bench):
    """They are of gigabytes, and were sent with each attempt to publish it."""
    plane = bench.worker()
    plane._client.kind = "export"
    plane._client.lost = {2, 4, 5}
    for name in ("model.keras", "saved_model.pb"):
        bench.write(name, name)
    files = {path.name: path for path in sorted(bench.folder.iterdir())}
    give_back(plane, TaskWork((0, 1), "export"), files)
    assert plane._client.uploads == ["model.keras", "saved_model.pb", "saved_model.pb"]
    assert plane._client.calls == 6
    bench.artefacts.publish_model((0, 1), TerminationMessage(outcome=Outcome.SUCCEEDED))
    manifest = ModelManifest.model_validate_json(bench.storage.read("model/manifest.json"))
    assert [file.name for file in manifest.files] == list(files)


def test_callable_message_is_evaluated_per_heartbeat_and_logged_once(bench, caplog):
    plane, words = bench.worker(), iter(["", "has waited 30 s for part-3", "has waited 31 s for part-3"])
    plane.set_message(lambda: next(words))
    expected = [plane._message_text() for _ in range(3)]
    assert expected == ["", "has waited 30 s for part-3", "has waited 31 s for part-3"]
    assert [record.message for record in caplog.records] == ["has waited 30 s for part-3"]


def test_messages_have_an_order(bench):
    plane, read = bench.worker(), [""]
    plane.set_message("has waited 300 s for a training step", About.STEP)
    plane.set_message(lambda: read[0])
    assert plane._message_text() == "has waited 300 s for a training step"
    read[0] = "has waited 30 s for part-3"
    assert plane._message_text() == read[0]
    plane.set_message("a parameter server is unreachable", About.OUTAGE)
    assert plane._message_text() == "a parameter server is unreachable"


def test_too_many_files_are_a_user_error(bench, monkeypatch):
    monkeypatch.setattr(coordination, "MAX_LIST", 1000)

    class Many(Files):
        def list(self):
            return tuple(f"s3://bucket/part-{n}" for n in range(1000))

    with pytest.raises(UserError, match=r"are 1,000 files, .*Put more samples into each file"):
        bench.worker(data=Many("s3://bucket/*", lambda _path: None))


def test_join_failure_is_logged_once_per_reason(bench, monkeypatch, caplog):
    monkeypatch.setattr(coordination, "FIRST_PAUSE", 0.0)
    plane, answers = bench.worker(), [Unreachable("no answer")] * 5 + [Unreachable("broken pipe")] * 3

    def join(*_, **__):
        if answers:
            raise answers.pop()
        return Joined()

    plane._client.join = join
    plane.start()
    try:
        assert plane._client.beats.get(timeout=30) == ""
    finally:
        plane.close()
        plane._thread.join(30)
    assert [record.message for record in caplog.records] == [
        f"cannot join yet: {why}; retrying" for why in ("broken pipe", "no answer")
    ]


def test_heartbeat_carries_the_message_until_cleared(bench, monkeypatch):
    monkeypatch.setattr(coordination, "HEARTBEAT_SECONDS", 0.001)
    plane = bench.worker()
    trouble = "cannot read s3://bucket/part-3: " + "no answer " * MAX_TEXT
    plane.set_message(trouble)
    plane.start()
    try:
        assert plane._client.beats.get(timeout=30) == trouble[:MAX_TEXT]
        plane.set_message("")
        while plane._client.beats.get(timeout=30):
            pass
    finally:
        plane.close()
        plane._thread.join(30)


def test_heartbeat_carries_an_outage_before_the_message_about_data(bench, monkeypatch):
    monkeypatch.setattr(coordination, "HEARTBEAT_SECONDS", 0.001)
    plane = bench.worker()
    outage, trouble = "a parameter server is unreachable (no answer)", "cannot read part-3"
    plane.set_message(outage, About.OUTAGE)
    plane.set_message(trouble)
    plane.start()
    try:
        assert plane._client.beats.get(timeout=30) == outage
        plane.set_message("", About.OUTAGE)
        while plane._client.beats.get(timeout=30) != trouble:
            pass
    finally:
        plane.close()
        plane._thread.join(30)


def test_heartbeat_says_how_long_a_read_takes(bench):
    plane, now, said = bench.worker(), [100.0], []
    plane._clock = lambda: now[0]
    plane._client.heartbeat = lambda beat: said.append(beat.reading_seconds) or Alive()

    def beats(seconds):
        now[0] += seconds
        plane._beat()

    beats(1.0)
    plane.set_message(lambda: "")  # as a read begins
    beats(5.0)
    plane.set_message("cannot read part-3: no answer")
    plane.set_message("a training step takes long", About.STEP)
    plane.set_message(lambda: "")  # it is tried again
    beats(5.0)
    plane.set_message("")
    beats(1.0)
    assert said == [0.0, 5.0, 10.0, 0.0]


def test_heartbeat_says_how_long_an_outage_lasts(bench):
    plane, now, said = bench.worker(), [100.0], []
    plane._clock = lambda: now[0]
    plane._client.heartbeat = lambda beat: said.append((beat.outage_seconds, beat.reading_seconds)) or Alive()
    for message in ("shard 1 is lost", "shard 0 is lost", ""):
        plane.set_message(message, About.OUTAGE)
        now[0] += 5.0
        plane._beat()
    assert said == [(5.0, 0.0), (10.0, 0.0), (0.0, 0.0)]


def test_worker_that_asks_for_no_work_learns_that_it_was_fenced(bench):
    plane = bench.worker()
    plane._joined.set()

    def refused(_):
        raise Fenced("its ranges went to others")

    plane._client.heartbeat = refused
    assert not plane.finished()
    plane._run()
    with pytest.raises(Fenced, match="its ranges went to others"):
        plane.finished()


def test_finished_job_is_learned_from_the_answer_to_a_heartbeat(bench, monkeypatch):
    monkeypatch.setattr(coordination, "HEARTBEAT_SECONDS", 0.001)
    plane = bench.worker()
    plane.start()
    try:
        plane._client.beats.get(timeout=30)
        assert not plane.finished()
        plane._client.finished = True
        while not plane.finished():
            plane._client.beats.get(timeout=30)
    finally:
        plane.close()
        plane._thread.join(30)


def test_request_for_work_reports_the_stop_that_the_worker_knows(bench):
    plane = bench.worker()
    plane.join({}, Wasted())
    plane.next_work(3, 7)
    assert plane._client.asked == (3, 7)


def test_flops_are_counted_when_asked_and_reported_once(bench, monkeypatch):
    monkeypatch.setattr(coordination, "HEARTBEAT_SECONDS", 0.001)
    plane = bench.worker()
    plane._count_flops = lambda: 80.0
    plane.start()
    try:
        plane._client.beats.get(timeout=30)
        assert plane._client.counted.empty()
        plane._client.count_flops = True
        assert plane._client.counted.get(timeout=30) == 80.0
    finally:
        plane.close()
        plane._thread.join(30)


def test_an_ending_worker_ends_its_requests_before_it_waits_for_a_thread_that_may_be_in_one(
    bench, monkeypatch
):
    """The word about files took 10 s more while parameter server 0 hung."""
    plane, closed = bench.worker(), []
    monkeypatch.setattr(plane._client, "close", lambda: closed.append("client"))
    monkeypatch.setattr(plane._late, "close", lambda: closed.append("late files"))
    plane.close()
    assert closed == ["client", "late files"]
