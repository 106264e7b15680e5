"""Memory of large buffers, measured in a process of its own, because the setting cannot be undone."""

import platform
import subprocess
import sys

import pytest

from shoal_trainer import serve
from shoal_trainer.contract import CONFIG_ENV, RuntimeConfig

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

PROGRAM = """
import sys
from threading import Thread

import psutil

if sys.argv[1] == "returned":
    from shoal_trainer.ps.malloc import return_freed_memory

    return_freed_memory()

kept = []


def allocate():
    for _ in range(2):  # the first round raises malloc's threshold
        large = []
        for _ in range(10):
            large.append(bytearray(1 << 20))
            kept.append(bytes(1000))
        del large


before = psutil.Process().memory_full_info().uss
for _ in range(2):
    thread = Thread(target=allocate)
    thread.start()
    thread.join()
print(psutil.Process().memory_full_info().uss - before)
"""


def growth(how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def test_server_sets_it_before_its_first_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Server:
        def __init__(self, _config: object) -> None:
            calls.append("server")

        def run(self) -> int:
            return 0

    monkeypatch.setenv(CONFIG_ENV, "{}")
    monkeypatch.setattr(RuntimeConfig, "model_validate_json", lambda _text: None)
    monkeypatch.setattr(serve, "allow_open_files", lambda: None)
    monkeypatch.setattr(serve, "stop_on_sigterm", lambda _server: None)
    monkeypatch.setattr(serve, "return_freed_memory", lambda: calls.append("memory"))
    monkeypatch.setattr(serve, "ParameterServer", Server)
    assert serve.main() == 0
    assert calls == ["memory", "server"]


def test_freed_buffers_return_to_the_system() -> None:
    assert growth("kept") > 8e6
    assert growth("returned") < 4e6
