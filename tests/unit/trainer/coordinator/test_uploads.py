"""Uploads to the control plane."""

import socket

import pytest

from shoal_trainer.coordinator.client import CoordinatorClient
from shoal_trainer.coordinator.protocol import PURPOSE
from shoal_trainer.errors import Fenced
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
