"""A worker's process: threads and garbage collection before user code, outages at the start, and exits."""

import gc
import os
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import (
    CONFIG_ENV,
    EXIT_USER,
    Outcome,
    Role,
    TerminationMessage,
    status_token,
)
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.run.processes import DONE_PATIENCE, MAX_FAILURES, LocalJob, LocalRun
from shoal_trainer.worker import main
from shoal_trainer.worker.answers import GOODBYE_SECONDS, LEAVE_SECONDS, Answers
from shoal_trainer.worker.hardware import THREADS_ENV
from shoal_trainer.worker.loop import End
from tests.unit.trainer.configs import pod_config


def test_threads_and_gc_are_configured_before_user_code_is_imported(monkeypatch):
    monkeypatch.setenv(THREADS_ENV, "")  # monkeypatch then restores it after the test
    monkeypatch.delenv(THREADS_ENV)
    monkeypatch.setattr("shoal_trainer.worker.hardware.cores", lambda _node: 3.0)
    monkeypatch.setattr("shoal_trainer.security.Credentials.load", lambda _folder: None)
    seen = []

    def load(_entrypoint, _args, archive):
        assert archive is None
        seen.append((os.environ[THREADS_ENV], gc.isenabled()))
        raise UserError("there is no such module")

    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", load)
    gc.unfreeze()
    try:
        with pytest.raises(UserError):
            main._work(pod_config(), None, 0.0)
        assert seen == [("3", False)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_local_workers_share_the_cores(monkeypatch):
    monkeypatch.delenv(THREADS_ENV, raising=False)
    monkeypatch.setattr("shoal_trainer.worker.hardware.cores", lambda _node: 6.0)
    threads = []

    def start(_command, *, env, **_):
        threads.append(env[THREADS_ENV])
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0, pid=-1)

    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", start)
    with LocalRun(LocalJob(entrypoint="a:b", workers=3)) as run:
        assert [process.role for process in run.processes] == [Role.PS, *[Role.WORKER] * 3]
    assert threads == ["2"] * 4


def test_local_workers_divide_the_gpus_of_this_machine(monkeypatch):
    """They share a card that there are too few of; the parameter server sees what it is given, and uses none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    given = []

    def start(_command, *, env, **_):
        given.append((env["CUDA_VISIBLE_DEVICES"], env.get("TF_FORCE_GPU_ALLOW_GROWTH")))
        return Ended()

    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", start)
    with LocalRun(LocalJob(entrypoint="a:b", workers=3)):
        assert given == [("0,1", None), ("0", "true"), ("1", "true"), ("0", "true")]


def test_processes_of_a_local_run_get_no_key_in_arguments_or_environment(monkeypatch):
    started = []

    def start(command, *, env, **_):
        started.append(" ".join([*command, *env, *env.values()]))
        return Ended()

    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", start)
    with LocalRun(LocalJob(entrypoint="a:b", workers=2)) as run:
        key = run.credentials.key
        private = (run.credentials.directory / "tls.key").read_text().splitlines()[1]
        forms = [key.hex(), b64encode(key).decode(), repr(key)[2:-1], private]
        forms += [run.credentials.token("control"), status_token(key)]
    assert len(started) == 3
    assert [form for form in forms if any(form in text for text in started)] == []


def _raise(error):
    raise error


@pytest.mark.by_day(1)
@pytest.mark.parametrize("failing", ["compose.build_flat_model", "coordination.ControlPlane"])
def test_store_outage_at_start_is_retried(monkeypatch, failing):
    answers = [UserError("the store is back"), Unreachable("no answer"), Unreachable("no answer")]
    monkeypatch.setattr("shoal_trainer.retry.FIRST_PAUSE", 0.0)
    monkeypatch.setattr(main, "fitted", lambda config, _device: config)
    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", lambda *_, **__: None)
    monkeypatch.setattr("shoal_trainer.security.Credentials.load", lambda _folder: None)
    model = SimpleNamespace(layout=SimpleNamespace(tensors=1), flops_per_sample=None)
    monkeypatch.setattr("shoal_trainer.worker.compose.build_flat_model", lambda *_: model)
    monkeypatch.setattr(f"shoal_trainer.worker.{failing}", lambda *_: _raise(answers.pop()))
    gc.unfreeze()
    try:
        with pytest.raises(UserError, match="the store is back"):
            main._work(pod_config(), SimpleNamespace(flag=threading.Event()), 0.0)
    finally:
        gc.unfreeze()
    assert not answers


def test_worker_tells_how_many_devices_its_model_computes_on(monkeypatch):
    """The planner counts a pool's accelerators so, and the speeds that it learns are those of so many."""
    told = []
    monkeypatch.setattr(main, "fitted", lambda config, _device: config)
    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", lambda *_, **__: None)
    monkeypatch.setattr("shoal_trainer.security.Credentials.load", lambda _folder: None)
    model = SimpleNamespace(
        layout=SimpleNamespace(tensors=1), flops_per_sample=None, device_count=3, precision=""
    )
    monkeypatch.setattr("shoal_trainer.worker.compose.build_flat_model", lambda *_: model)

    def control_plane(_config, _credentials, _job, facts, _flops):
        told.append(facts().devices)
        raise UserError("that is all")

    monkeypatch.setattr("shoal_trainer.worker.coordination.ControlPlane", control_plane)
    gc.unfreeze()
    try:
        with pytest.raises(UserError, match="that is all"):
            main._work(pod_config(), SimpleNamespace(flag=threading.Event()), 0.0)
    finally:
        gc.unfreeze()
    assert told == [3]


def test_sigterm_while_the_main_thread_holds_the_lock_of_the_flag_is_noticed():
    previous = signal.getsignal(signal.SIGTERM)
    try:
        drain = main.Drain()
        hurried = threading.Event()
        drain.hold(hurried.set)
        with drain.flag._cond:  # held at times within `Event.wait`
            signal.raise_signal(signal.SIGTERM)
        assert drain.flag.wait(20)
        assert hurried.wait(20)
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_worker_that_is_to_stop_has_10_s_for_all_that_it_waits_for_and_2_s_to_say_that_it_leaves():
    """In a request that parameter server 0 did not answer, and then for its last push, it took longer than it has."""
    now, ended = [0.0], []
    answers = Answers(None, threading.Event(), lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    worker = SimpleNamespace(loop=SimpleNamespace(upstream=SimpleNamespace(answers=answers)))
    main._hurry(worker, SimpleNamespace(end_requests=lambda: ended.append(now[0])), sleep)
    with pytest.raises(Unreachable, match="no answer"):
        answers.last(Future())
    assert ended == [now[0]] == [LEAVE_SECONDS]
    assert answers.left() == GOODBYE_SECONDS


def test_thread_of_user_code_does_not_keep_the_process_alive():
    code = """
import atexit, sys, threading
from shoal_trainer.termination import deadline
deadline.EXIT_SECONDS = 0.5
print("the last words", end="")
threading.Thread(target=threading.Event().wait).start()
deadline.end_soon(3)
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (3, b"the last words")


FETCHES = """
from types import SimpleNamespace
from shoal_trainer import retry
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import code_client, main

def fetch(_config, _credentials, folder):
    tried.append((folder / "code.zip").touch())
    if len(tried) < 3:
        raise Unreachable("no answer")
    return folder / "code.zip"

tried, retry.FIRST_PAUSE, code_client.fetch = [], 0.0, fetch
assert main._code(SimpleNamespace(code_digest="some"), None).exists()
"""


def test_the_code_of_the_job_is_removed_when_the_process_ends(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", FETCHES], env=environment, timeout=200, check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (Unreachable("no answer"), UserError("the label is 7")),
        (ProtocolError("odd"), UserError("the label is 7")),
        (Fenced("a newer incarnation"), Fenced("a newer incarnation")),  # the job goes on without this worker
    ],
)
def test_user_error_survives_a_coordinator_that_refuses_it(monkeypatch, caplog, answer, raised):
    plane = SimpleNamespace(
        start=lambda: None,
        close=lambda: None,
        failed=lambda _error: _raise(answer),
        watch=lambda _beside: None,
    )
    layout = SimpleNamespace(size=1, tensors=1)
    keras_model = SimpleNamespace(jit_compile=False)
    model = SimpleNamespace(trace=lambda: None, layout=layout, flops_per_sample=None, model=keras_model)
    worker = SimpleNamespace(
        run=lambda _on_hang: _raise(UserError("the label is 7")),
        close=lambda: None,
        loop=SimpleNamespace(beside=None),
    )
    monkeypatch.setattr(main, "fitted", lambda config, _device: config)
    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", lambda *_, **__: None)
    monkeypatch.setattr("shoal_trainer.security.Credentials.load", lambda _folder: None)
    monkeypatch.setattr("shoal_trainer.worker.compose.build_flat_model", lambda *_: model)
    monkeypatch.setattr("shoal_trainer.worker.compose.compose", lambda *_: worker)
    monkeypatch.setattr("shoal_trainer.worker.coordination.ControlPlane", lambda *_: plane)
    drain = SimpleNamespace(flag=threading.Event(), hold=lambda _: None)
    gc.unfreeze()
    try:
        with pytest.raises(type(raised), match=str(raised)):
            main._work(pod_config(), drain, 0.0)
    finally:
        gc.unfreeze()
    if isinstance(answer, Fenced):
        assert "the label is 7" in caplog.text


@pytest.mark.parametrize(
    ("jit", "line"),
    [
        (
            True,
            "ready in 13.0 s: import 2.00 s, build and trace 4.00 s, compile 7.00 s, 5 parameters, batches of 32 on",
        ),
        (
            False,
            "ready in 6.0 s: import 2.00 s, build and trace 4.00 s, compile 0.00 s, 5 parameters, batches of 32 on",
        ),
    ],
)
def test_log_tells_what_the_start_took_and_the_step_is_compiled_first(monkeypatch, caplog, jit, line):
    seconds, done = [100.0], []

    def takes(duration, what, result=None):
        def call(*_, **__):
            seconds[0] += duration
            done.append(what)
            return result

        return call

    plane = SimpleNamespace(
        start=takes(0, "heartbeats"),
        close=lambda: None,
        watch=lambda _beside: None,
        set_message=lambda *_: None,
    )
    flat_model = SimpleNamespace(
        trace=takes(4, "trace"), compile=takes(7, "compile"), layout=SimpleNamespace(size=5, tensors=1),
        flops_per_sample=None, model=SimpleNamespace(jit_compile=jit),
    )  # fmt: skip
    worker = SimpleNamespace(
        run=takes(0, "joins", End.FINISHED), close=lambda: None, loop=SimpleNamespace(beside=None)
    )
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(main, "fitted", lambda config, _device: config)
    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", takes(2, "import"))
    monkeypatch.setattr("shoal_trainer.security.Credentials.load", lambda _folder: None)
    monkeypatch.setattr("shoal_trainer.worker.compose.build_flat_model", lambda *_: flat_model)
    monkeypatch.setattr("shoal_trainer.worker.compose.compose", lambda *_: worker)
    monkeypatch.setattr("shoal_trainer.worker.coordination.ControlPlane", lambda *_: plane)
    caplog.set_level("INFO")
    gc.unfreeze()
    try:
        main._work(pod_config(), SimpleNamespace(flag=threading.Event(), hold=lambda _: None), 100.0)
    finally:
        gc.unfreeze()
    assert line in caplog.text
    assert done == ["import", "heartbeats", "trace", *["compile"] * jit, "joins"]


def test_sys_exit_in_user_code_is_a_user_error_exit(monkeypatch, tmp_path):
    monkeypatch.setenv(CONFIG_ENV, pod_config().to_json())
    monkeypatch.setenv("SHOAL_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setattr(main, "Drain", lambda: None)
    monkeypatch.setattr(main, "_work", lambda *_: sys.exit(0))
    assert main.main() == EXIT_USER
    assert "ends the process: SystemExit: 0" in (tmp_path / "message").read_text()


class Ended:
    """A process that exited with code 0."""

    pid = -1

    def __init__(self, *_, **__):
        self.code = 0

    def poll(self):
        return self.code

    def wait(self):
        return self.code

    def send_signal(self, signal):
        self.code = -signal

    def kill(self):
        self.send_signal(signal.SIGKILL)


def test_local_worker_that_exits_early_is_replaced(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", Ended)
    with LocalRun(LocalJob(entrypoint="a:b"), clock=lambda: now[0]) as run:
        server, worker = run.processes
        server.popen.code = None
        for now[0] in (0.0, 1.0, DONE_PATIENCE - 0.1):
            assert run.poll() is None
            assert run.processes == [server, worker]
        now[0] = DONE_PATIENCE
        assert run.poll() is None
        assert [process.name for process in run.processes] == ["ps-0-0", "worker-0-1"]
        assert run.failures == 1
        for _ in range(2 * (MAX_FAILURES + 2)):
            now[0] += DONE_PATIENCE
            run.poll()
        assert run.outcome.outcome is Outcome.FAILED
        assert run.outcome.reason == "BackoffLimit"


class Full(Ended):
    """A worker that ran out of memory; the server goes on."""

    def __init__(self, command, *, env, **_):
        self.code = None if command[-1] == "serve" else 1
        message = TerminationMessage(outcome=Outcome.FAILED, reason="OutOfMemory", message="a smaller batch")
        Path(env["SHOAL_TERMINATION_LOG"]).write_text(message.to_json())


def test_local_job_that_does_not_fit_into_the_memory_twice_fails(monkeypatch):
    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", Full)
    with LocalRun(LocalJob(entrypoint="a:b", workers=2)) as run:
        assert run.poll() is None
        assert [process.name for process in run.processes] == ["ps-0-0", "worker-0-1", "worker-1-1"]
        assert run.poll().reason == "OutOfMemory"


HANGS = """
import threading
from types import SimpleNamespace
from shoal_trainer.worker import main, watchdog
watchdog.CHECK_SECONDS = watchdog.FIRST_SECONDS = 0.01
worker = SimpleNamespace(watchdog=watchdog.Watchdog(), leave=lambda: print("left", end="", flush=True))
worker.watchdog.start(lambda error: main.abandon(worker, error))
with worker.watchdog.watch("a training step on samples 0-8"):
    threading.Event().wait()
"""


def test_worker_whose_step_hangs_gives_its_leases_back_and_ends_with_the_reason(tmp_path):
    message = tmp_path / "message"
    environment = os.environ | {"SHOAL_TERMINATION_LOG": str(message)}
    command = [sys.executable, "-c", HANGS]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=400, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"left"), ended.stderr.decode()
    assert b"most recent call first" in ended.stderr
    said = TerminationMessage.model_validate_json(message.read_text())
    assert said.reason == "HungStep"
    assert "a training step on samples 0-8 has not ended" in said.message


class Endless(Ended):
    """A process that runs until it gets a signal."""

    def __init__(self, *_, **__):
        self.code = None


@pytest.mark.parametrize(
    ("kill", "names"),
    [
        ("worker", ["ps-0-0", "worker-0-1"]),
        ("ps", ["ps-0-1", "worker-0-0"]),
    ],
)
def test_kill_every_kills_a_process_which_is_replaced(monkeypatch, kill, names):
    now = [0.0]
    monkeypatch.setattr("shoal_trainer.run.processes.subprocess.Popen", Endless)
    with LocalRun(LocalJob(entrypoint="a:b", kill_every=5.0, kill=kill), clock=lambda: now[0]) as run:
        before = list(run.processes)
        for now[0] in (0.0, 4.9):
            assert run.poll() is None
            assert run.processes == before
        assert run.kills == 0
        for kills in range(1, MAX_FAILURES + 3):
            now[0] = 5.0 * kills
            run.poll()
            assert [process.popen.poll() for process in run.processes].count(-signal.SIGKILL) == 1
            assert run.poll() is None
            assert [process.popen.poll() for process in run.processes] == [None, None]
            assert (run.kills, run.failures) == (kills, 0)
            if kills == 1:
                assert sorted(process.name for process in run.processes) == names
    assert all(process.popen.poll() == -signal.SIGKILL for process in run.processes)
