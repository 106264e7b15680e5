"""Uploads to the control plane, and downloads from it."""

import errno
import io
import os
import socket
from types import SimpleNamespace

import pytest

from shoal_trainer.coordinator.control_client import CoordinatorClient
from shoal_trainer.coordinator.protocol import PURPOSE
from shoal_trainer.errors import BadName, DiskFull, Fenced, Overtaken, Unreachable, UserError
from tests.unit.trainer.coordinator.served import SECONDS


def test_uploaded_file_arrives_whole_under_its_token(start_server, tmp_path):
    served = start_server()
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    worker.upload((4, 9), "logs/ü 1.csv", tmp_path / "file")
    worker.close()
    assert served.files == {(2, 1, (4, 9), "logs/ü 1.csv"): content}


def test_upload_under_a_reassigned_token_is_fenced(start_server, tmp_path):
    served = start_server()
    served.error = Fenced("the task is another worker's")
    (tmp_path / "file").write_bytes(b"x")
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    with pytest.raises(Fenced, match="another worker's"):
        worker.upload((4, 9), "x", tmp_path / "file")
    worker.close()
    assert served.files == {}


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "EUCLEAN", "EBADMSG", "ETIMEDOUT"])
def test_a_file_that_the_workers_disk_cannot_read_is_no_fault_of_the_coordinator(start_server, code):
    """Else it would be sent again for ever."""
    code = getattr(errno, code)

    class Worn(io.BytesIO):
        def read(self, size=-1):
            raise OSError(code, os.strerror(code))

    served = start_server()
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    file = SimpleNamespace(open=lambda _: Worn(), stat=lambda: SimpleNamespace(st_size=9))
    with pytest.raises(OSError, match=os.strerror(code)):
        worker.upload((4, 9), "x", file)
    worker.close()
    assert served.files == {}


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "error",
    [Overtaken("another worker has it"), Unreachable("no bucket"), UserError("no"), BadName("too long")],
)
@pytest.mark.parametrize("read", [0, 5 << 20])
def test_refusal_of_a_large_upload_reaches_its_worker(start_server, tmp_path, error, read):
    def upload(_slot, _incarnation, _token, _name, chunks):
        taken = 0
        while taken < read:
            taken += len(next(chunks))
        raise error

    served = start_server()
    served.server.upload = upload
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 << 20)  # more than the buffers of the connection
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    with pytest.raises(type(error), match=str(error)):
        worker.upload((4, 9), "x", tmp_path / "file")
    worker.close()


def test_truncated_upload_stores_no_file(start_server):
    served = start_server()
    token = served.credentials.token(PURPOSE)
    connection = served.connect()
    connection.sendall(
        f"PUT /v1/files/0/0/0/1/x HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 1000000\r\n\r\n".encode()
        + b"half of it"
    )
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert served.cut.wait(SECONDS)
    assert served.files == {}
    assert served.works()


@pytest.fixture
def worker(start_server):
    served = start_server()
    client = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    client.served = served
    yield client
    client.close()


def test_downloaded_file_arrives_whole(worker, tmp_path):
    worker.served.content = bytes(range(256)) * 20_000
    assert worker.download((4, 9), "logs/ü 1.npz", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == worker.served.content
    assert worker.served.asked == (2, 1, (4, 9), "logs/ü 1.npz")


def test_download_of_a_missing_file_says_so(worker, tmp_path):
    assert not worker.download((4, 9), "logs/x", tmp_path / "file")


@pytest.mark.parametrize("error", [Overtaken("not the export"), Unreachable("no storage")])
def test_refused_download_keeps_its_error(worker, tmp_path, error):
    worker.served.error = error
    with pytest.raises(type(error), match=str(error)):
        worker.download((4, 9), "logs/x", tmp_path / "file")


def test_download_that_breaks_off_is_repeated_and_not_used(worker, tmp_path):
    worker.served.content, worker.served.broken = bytes(5 << 20), 2 << 20
    with pytest.raises(Unreachable, match="IncompleteRead"):
        worker.download((4, 9), "logs/x", tmp_path / "file")
    worker.served.broken = None
    assert worker.download((4, 9), "logs/x", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == worker.served.content


@pytest.mark.parametrize("path", ["1/2/3/logs", "a/0/0/0/x", "0/0/0/0/../x", "0/0/0/0/"])
def test_malformed_paths_of_files_are_refused(worker, path):
    assert worker.served.ask("GET", f"/v1/files/{path}")[0] == 400
    assert worker.served.ask("GET", "/v1/files/0/0/0/0/x", token="wrong")[0] == 401
    assert worker.served.works()


class Full:
    """A file on a disk that is full, as the system says when it writes, or only at the end, when it closes."""

    name = "best.npz"

    def __init__(self, number, *, when):
        self.error, self.when = OSError(number, "no room"), when

    def open(self, _mode):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.when == "close":
            raise self.error

    def write(self, _data):
        if self.when == "write":
            raise self.error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", ["write", "close"])
def test_disk_that_is_full_is_not_taken_for_a_silent_coordinator(worker, number, when):
    worker.served.content = bytes(5 << 20)
    with pytest.raises(DiskFull, match=r"best\.npz does not fit on the worker's disk.*ephemeral-storage"):
        worker.download((4, 9), "logs/best.npz", Full(number, when=when))
