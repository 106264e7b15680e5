"""The control plane's server on loopback, towards clients that are wrong, slow, or gone."""

import contextlib
import http.client
import json
import logging
import socket
import ssl
import threading
import time

import pytest

from shoal_trainer.contract import STATUS_PATH, Phase, Shard, StatusReport
from shoal_trainer.coordinator import http as http_server
from shoal_trainer.coordinator.client import ControlClient, CoordinatorClient
from shoal_trainer.coordinator.http import ControlServer, safe_name
from shoal_trainer.coordinator.protocol import (
    MAX_BODY,
    MAX_FILE,
    MAX_JOIN,
    MAX_LIST,
    PURPOSE,
    DataSpec,
    Done,
    Given,
    Heartbeat,
    Joined,
    Next,
)
from shoal_trainer.errors import Fenced, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.security import create_secret_dir
from shoal_trainer.wire.channel import DEAD_SECONDS

SECONDS = 20


class Served:
    """A control server with a handler for `next` that does as it is told, and one that takes files."""

    def __init__(self, folder, **options):
        self.credentials = create_secret_dir(folder)
        self.error = None
        self.files = {}
        self.cut = threading.Event()
        self.server = ControlServer(
            self.credentials,
            {"next": self.next, "heartbeat": self.heartbeat},
            host="127.0.0.1",
            status=lambda: StatusReport(job_uid="u", phase=Phase.TRAINING, step=7),
            upload=self.upload,
            **options,
        )
        self.server.start()
        self.address = Shard(host="127.0.0.1", control_port=self.server.port)

    def next(self, request):
        if self.error is not None:
            raise self.error
        return Given(kind="idle", seconds=request.slot)

    def heartbeat(self, request):
        return Done()

    def upload(self, slot, incarnation, token, name, chunks):
        if self.error is not None:
            raise self.error
        try:
            content = b"".join(chunks)
        except Unreachable:
            self.cut.set()
            raise
        self.files[slot, incarnation, token, name] = content

    def connect(self):
        plain = socket.create_connection(("127.0.0.1", self.server.port), SECONDS)
        return self.credentials.client_context().wrap_socket(plain, server_hostname="127.0.0.1")

    def ask(self, method, path, body=None, *, token=None, length=None):
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.server.port, timeout=SECONDS, context=self.credentials.client_context()
        )
        headers = {"Authorization": f"Bearer {token or self.credentials.token(PURPOSE)}"}
        if length is not None:
            headers["Content-Length"] = str(length)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def works(self):
        client = ControlClient(self.address, self.credentials, timeout=SECONDS)
        try:
            return self.answer(client, 3) == 3
        finally:
            client.close()

    @staticmethod
    def answer(client, slot):
        """What the server answers. Where this machine is slower than `proof_seconds` allows, it is asked again."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return client.call("next", Next(slot=slot, incarnation=0, number=1), Given).seconds
            except Unreachable:
                if time.monotonic() > deadline:
                    raise


@pytest.fixture
def start(tmp_path):
    made = []

    def make(**options):
        made.append(Served(tmp_path / f"secret{len(made)}", **options))
        return made[-1]

    yield make
    for served in made:
        served.server.close()


def test_an_answer_is_one_record(start):
    # As two, the second waits until the client's kernel acknowledges the first: up to 40 ms for each lease.
    served = start()
    body = json.dumps({"slot": 3, "incarnation": 0, "number": 1, "generation": 0}).encode()
    head = (
        f"POST /v1/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.credentials.token(PURPOSE)}\r\n"
    )
    with served.connect() as client:
        for _ in range(2):
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = client.recv(1 << 16)  # TLS gives one record at a time
            assert answer.startswith(b"HTTP/1.1 200")
            assert Given.model_validate_json(answer.partition(b"\r\n\r\n")[2]).seconds == 3


def test_the_status_has_a_token_of_its_own(start):
    served = start()
    status = served.credentials.token("status")
    code, body = served.ask("GET", STATUS_PATH, token=status)
    assert (code, json.loads(body)["step"]) == (200, 7)
    assert served.ask("GET", STATUS_PATH)[0] == 401  # the workers' token
    assert served.ask("POST", "/v1/next", b"{}", token=status)[0] == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic {token}", "bearer {token}", "{token}"]
)
def test_without_the_token_nothing_is_answered(start, header):
    served = start()
    value = header.format(token=served.credentials.token(PURPOSE))
    with served.connect() as connection:
        connection.sendall(
            f"POST /v1/next HTTP/1.1\r\nAuthorization: {value}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        )
        assert b" 401 " in connection.recv(4096).splitlines()[0]
        while connection.recv(4096):
            pass  # and it ends
    assert served.works()


def test_refusals_are_said_once_and_show_no_token(start, caplog):
    served = start()
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            served.ask("POST", "/v1/next", b"{}", token="not-the-token")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "no valid token" in said[0]
    assert "not-the-token" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/next"),
        ("POST", "/v1/nothing"),
        ("POST", "/v1/../next"),
        ("PUT", "/v1/files/0/0/0/1"),
        ("PUT", "/v1/files/0/-1/0/1/x"),
        ("PUT", "/v1/files/a/0/0/1/x"),
        ("PUT", "/v1/files/0/0/0/1/..%2f..%2fetc%2fpasswd"),
        ("PUT", "/v1/files/0/0/0/1/%2fetc%2fpasswd"),
        ("PUT", "/v1/files/0/0/0/1/a%00b"),
    ],
)
def test_a_wrong_path_is_refused(start, method, path):
    served = start()
    code, body = served.ask(method, path, b"{}")
    assert code == 400
    assert "there is no" in body or "not a name" in body
    assert served.files == {}


@pytest.mark.parametrize("name", ["a", "saved_model/variables/variables.index", "logs/ü.csv", "..a", "a..b"])
def test_names_of_files_that_are_good(name):
    assert safe_name(name) == name


@pytest.mark.parametrize("name", ["", "/a", "a/../b", "./a", "a//b", "a/", "a\\b", "a\0b", "x" * 513, ".."])
def test_names_of_files_that_are_not(name):
    with pytest.raises(ProtocolError):
        safe_name(name)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"slot": -1, "incarnation": 0}', b'{"slot": 1}', b"\xff\xfe"]
)
def test_a_body_that_is_no_request_is_refused(start, body):
    served = start()
    code, said = served.ask("POST", "/v1/next", body)
    assert code == 400
    assert "not a valid request next" in said


@pytest.mark.parametrize("length", ["-1", "1e3", "x", str(MAX_BODY + 1), "9" * 40])
def test_a_body_of_impossible_length_is_refused_before_it_is_read(start, length):
    served = start()
    code, said = served.ask("POST", "/v1/next", b"", length=length)
    assert (code, "at most" in said) == (400, True)
    code, said = served.ask("PUT", "/v1/files/0/0/0/1/x", b"", length=MAX_FILE + 1)
    assert (code, "at most" in said) == (400, True)


def test_a_hello_may_tell_of_more_files_than_another_request_may_hold(start):
    served, told = start(), []

    def join(request):
        told.append(request.data)
        return Joined()

    served.server.handlers["join"] = join
    data = DataSpec(
        files=tuple(f"s3://bucket/a-folder-of-some-depth/part-{n:06}.tfrecord" for n in range(120_000))
    )
    assert MAX_BODY < len(data.to_json()) < MAX_LIST
    client = CoordinatorClient(served.address, served.credentials, 0, 0, timeout=SECONDS)
    client.join(data, 16)
    client.close()
    assert told == [data]
    code, said = served.ask("POST", "/v1/join", b"", length=MAX_JOIN + 1)
    assert (code, "at most" in said) == (400, True)


@pytest.mark.parametrize(
    "error", [Fenced("newer"), UserError("mend it"), ProtocolError("no"), Unreachable("later")]
)
def test_errors_arrive_as_they_were_raised(start, error):
    served = start()
    served.error = error
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    for _ in range(2):  # the connection was closed, and another one opens
        with pytest.raises(type(error), match=str(error)):
            client.call("next", Next(slot=0, incarnation=0, number=1), Given)
    client.close()


def test_what_breaks_inside_is_logged_and_worth_another_try(start, caplog):
    served = start()
    served.error = RuntimeError("a bug")
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    with pytest.raises(Unreachable, match="500"):
        client.call("next", Next(slot=0, incarnation=0, number=1), Given)
    client.close()
    assert "a bug" in caplog.text
    served.error = None
    assert served.works()


def test_another_jobs_key_is_refused_by_both_sides(start, tmp_path):
    served, other = start(), create_secret_dir(tmp_path / "other")
    client = ControlClient(served.address, other, timeout=SECONDS)
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it looks away
    plain = socket.create_connection(("127.0.0.1", served.server.port), SECONDS)
    with context.wrap_socket(plain) as connection:
        token = other.token(PURPOSE)
        connection.sendall(
            f"POST /v1/heartbeat HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        assert b" 401 " in connection.recv(4096).splitlines()[0]
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client._headers = {"Authorization": f"Bearer {token}"}  # it has the certificate, and not the key
    with pytest.raises(Unauthorized):
        client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    client.close()


def test_a_plain_client_holds_up_nobody(start):
    served = start()
    with socket.create_connection(("127.0.0.1", served.server.port), SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert served.works()
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(4096):
                pass  # told in TLS that it is wrong, and closed
    assert served.works()


@pytest.mark.parametrize("part", [b"", b"POST /v1/next HT", b"POST /v1/next HTTP/1.1\r\nAuthorization: Bea"])
def test_who_proves_nothing_in_time_is_closed_however_slow(start, part):
    served = start(proof_seconds=0.2)
    with served.connect() as connection:
        connection.sendall(part)
        assert served.works()
        assert connection.recv(4096) == b""
    assert served.works()


def test_who_has_proven_itself_may_be_slow(start):
    served = start(proof_seconds=0.2)
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    served.answer(client, 0)
    kept = client._connection
    with served.connect() as silent:
        assert silent.recv(1) == b""  # another one's time is up
    client.call("next", Next(slot=0, incarnation=0, number=1), Given)
    assert client._connection is kept
    client.close()


def test_who_proves_nothing_takes_no_place_of_those_who_did(start, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_UNPROVEN", 1)
    served = start()
    clients = [ControlClient(served.address, served.credentials, timeout=SECONDS) for _ in range(4)]
    for client in clients[:3]:
        assert served.answer(client, 3) == 3  # each keeps its connection
    late = clients[3]
    with served.connect():
        with pytest.raises(Unreachable):
            late.call("next", Next(slot=0, incarnation=0, number=1), Given)
        assert served.answer(clients[0], 5) == 5
    assert served.answer(late, 3) == 3  # the silent one has gone
    for client in clients:
        client.close()


def test_no_more_connections_than_there_are_places(start, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    served = start()
    clients = [ControlClient(served.address, served.credentials, timeout=SECONDS) for _ in range(3)]
    for client in clients[:2]:
        assert served.answer(client, 3) == 3
    with pytest.raises(Unreachable):
        clients[2].call("next", Next(slot=0, incarnation=0, number=1), Given)
    clients[0].close()
    assert served.answer(clients[2], 3) == 3
    for client in clients:
        client.close()


def test_a_file_arrives_whole_under_its_token(start, tmp_path):
    served = start()
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    worker.upload((4, 9), "logs/ü 1.csv", tmp_path / "file")
    worker.close()
    assert served.files == {(2, 1, (4, 9), "logs/ü 1.csv"): content}


def test_a_file_under_a_token_of_somebody_else_is_refused(start, tmp_path):
    served = start()
    served.error = Fenced("the task is somebody else's")
    (tmp_path / "file").write_bytes(b"x")
    worker = CoordinatorClient(served.address, served.credentials, 2, 1, timeout=SECONDS)
    with pytest.raises(Fenced, match="somebody else's"):
        worker.upload((4, 9), "x", tmp_path / "file")
    worker.close()
    assert served.files == {}


def test_the_kernel_watches_for_the_death_of_the_coordinators_machine(start):
    served = start()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
    sock = client._connection.sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_SECONDS * 1000
    client.close()


def test_an_upload_that_is_cut_off_is_no_file(start):
    served = start()
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


def test_an_idle_connection_that_was_closed_is_opened_again(start):
    served = start()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    client.call("next", Next(slot=0, incarnation=0, number=1), Given)
    served.server._server.end_connections()
    while served.server._server._open:
        pass
    assert client.call("next", Next(slot=5, incarnation=0, number=1), Given).seconds == 5
    client.close()


def test_closed_from_another_thread_while_it_connects_it_leaves_no_socket(start, monkeypatch):
    served = start()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    connect, opened = http.client.HTTPSConnection.connect, []

    def closed_meanwhile(connection):
        client.close()
        connect(connection)
        opened.append(connection.sock)

    monkeypatch.setattr(http.client.HTTPSConnection, "connect", closed_meanwhile)
    with pytest.raises(Unreachable):
        client.call("next", Next(slot=5, incarnation=0, number=1), Given)
    assert [sock.fileno() for sock in opened] == [-1]


def test_closed_from_another_thread_while_it_waits_it_opens_no_other(start, monkeypatch):
    served = start()
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    assert served.answer(client, 3) == 3

    def closed_meanwhile(_connection):
        client.close()
        raise ConnectionResetError

    monkeypatch.setattr(http.client.HTTPSConnection, "getresponse", closed_meanwhile)
    with pytest.raises(Unreachable):
        client.call("next", Next(slot=3, incarnation=0, number=2), Given)
    assert client._connection is None


def test_close_ends_the_connections(start):
    served = start()
    connection = served.connect()
    connection.sendall(b"POST /v1/next HTTP/1.1\r\n")
    served.works()
    served.server.close()
    assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(OSError):
        served.connect()


@pytest.mark.parametrize("said", [b"", b'{"kind": "id'])
def test_an_answer_that_is_cut_off_is_no_answer(tmp_path, said):
    credentials = create_secret_dir(tmp_path)
    context = credentials.server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + said)

        thread = threading.Thread(target=serve)
        thread.start()
        address = Shard(host="127.0.0.1", control_port=listener.getsockname()[1])
        client = ControlClient(address, credentials, timeout=SECONDS)
        with pytest.raises(Unreachable, match="does not answer"):
            client.call("next", Next(slot=0, incarnation=0, number=1), Given)
        thread.join(SECONDS)
        client.close()
