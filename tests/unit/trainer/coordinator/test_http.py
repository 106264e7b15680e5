"""The control plane's server on loopback: tokens, paths, bodies and errors."""

import contextlib
import json
import logging
import socket
import threading
import tracemalloc
from random import Random

import pytest

from shoal_trainer.contract import STATUS_PATH, Shard
from shoal_trainer.coordinator.control_client import MAX_ANSWER, ControlClient, CoordinatorClient
from shoal_trainer.coordinator.http import safe_name
from shoal_trainer.coordinator.protocol import (
    FILES,
    MAX_BODY,
    MAX_FILE,
    MAX_JOIN,
    MAX_LIST,
    PURPOSE,
    REQUESTS,
    Assignment,
    DataSpec,
    Done,
    Join,
    Joined,
    Next,
)
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.security import create_secret_dir
from tests.unit.trainer.coordinator.served import SECONDS


def test_response_is_sent_as_one_tls_record(start_server):
    # With two records, the second waits for the client's delayed ACK: up to 40 ms per lease.
    served = start_server()
    body = json.dumps({"slot": 3, "incarnation": 0, "number": 1, "generation": 0}).encode()
    head = (
        f"POST /v1/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.credentials.token(PURPOSE)}\r\n"
    )
    with served.connect() as client:
        for _ in range(2):
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = client.recv(1 << 16)  # TLS gives one record at a time
            assert answer.startswith(b"HTTP/1.1 200")
            assert Assignment.model_validate_json(answer.partition(b"\r\n\r\n")[2]).seconds == 3


def test_status_needs_its_own_token(start_server):
    served = start_server()
    status = served.credentials.token("status")
    code, body = served.ask("GET", STATUS_PATH, token=status)
    assert (code, json.loads(body)["step"]) == (200, 7)
    assert served.ask("GET", STATUS_PATH)[0] == 401  # the workers' token
    assert served.ask("POST", "/v1/next", b"{}", token=status)[0] == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic {token}", "bearer {token}", "{token}"]
)
def test_request_without_valid_token_is_unauthorized(start_server, header):
    served = start_server()
    value = header.format(token=served.credentials.token(PURPOSE))
    with served.connect() as connection:
        connection.sendall(
            f"POST /v1/next HTTP/1.1\r\nAuthorization: {value}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        )
        assert b" 401 " in connection.recv(4096).splitlines()[0]
        while connection.recv(4096):
            pass  # until the server closes
    assert served.works()


def test_refusals_are_logged_once_without_the_token(start_server, caplog):
    served = start_server()
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            served.ask("POST", "/v1/next", b"{}", token="not-the-token")
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 1
    assert "no valid token" in messages[0]
    assert "not-the-token" not in caplog.text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("known", [True, False])
def test_paths_do_not_reach_the_log_of_a_stranger_and_those_of_workers_in_short(
    start_server, caplog, method, known
):
    served = start_server()
    token = served.credentials.token(PURPOSE) if known else "none"
    head = f"Authorization: Bearer {token}\r\nContent-Length: 0"
    with served.connect() as connection:
        connection.sendall(f"{method} /\x1b]0;mine\x07{'a' * 10_000} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        assert (b" 400 " if known else b" 401 ") in connection.recv(4096).splitlines()[0]
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert message.isprintable()
    assert len(message) < 400
    assert ("mine" in message) == known


def test_number_of_very_many_digits_is_refused(start_server, caplog):
    served, digits = start_server(), "9" * 5000
    assert served.ask("POST", "/v1/next", b"", length=digits)[0] == 400
    assert served.ask("GET", f"{FILES}0/0/0/{digits}/a")[0] == 400
    assert "Traceback" not in caplog.text


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
def test_invalid_path_is_refused(start_server, method, path):
    served = start_server()
    code, body = served.ask(method, path, b"{}")
    assert code == 400
    assert "unknown path" in body or "not a relative file name" in body
    assert served.files == {}


@pytest.mark.parametrize("name", ["a", "saved_model/variables/variables.index", "logs/ü.csv", "..a", "a..b"])
def test_safe_names_are_accepted(name):
    assert safe_name(name) == name


@pytest.mark.parametrize("name", ["", "/a", "a/../b", "./a", "a//b", "a/", "a\\b", "a\0b", "x" * 513, ".."])
def test_unsafe_names_are_refused(name):
    with pytest.raises(ProtocolError):
        safe_name(name)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"slot": -1, "incarnation": 0}', b'{"slot": 1}', b"\xff\xfe"]
)
def test_invalid_body_is_refused(start_server, body):
    served = start_server()
    code, answer = served.ask("POST", "/v1/next", body)
    assert code == 400
    assert "not a valid request next" in answer


FIELDS = sorted({name for request in REQUESTS.values() for name in request.model_fields})


def any_value(random):
    """A value of a field, valid for some of them."""
    number = random.choice([0, 1, -1, 2**63, 10**40, 1e308, -0.5])
    values = [number, str(number), None, True, "x" * 5000, [], {}, [[number] * 4] * 3, {"": number}]
    return random.choice([*values, dict.fromkeys(random.sample(FIELDS, 5), number)])


@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_any_request_body_is_refused_or_accepted(start_server, name):
    served, random = start_server(), Random(name)
    served.server.handlers[name] = lambda _request: Done()
    for _ in range(20):
        fields = {field: any_value(random) for field in FIELDS if random.random() < 0.5}
        body = bytearray(json.dumps(fields).encode())
        if random.random() < 0.5:
            body[random.randrange(len(body))] = random.randrange(256)
        assert served.ask("POST", f"/v1/{name}", bytes(body))[0] in {200, 400}


@pytest.mark.parametrize("length", ["-1", "1e3", "x", str(MAX_BODY + 1), "9" * 40])
def test_invalid_content_length_is_refused_before_reading(start_server, length):
    served = start_server()
    code, answer = served.ask("POST", "/v1/next", b"", length=length)
    assert (code, "at most" in answer) == (400, True)
    code, answer = served.ask("PUT", "/v1/files/0/0/0/1/x", b"", length=MAX_FILE + 1)
    assert (code, "at most" in answer) == (400, True)


def test_join_may_exceed_the_body_limit_of_other_requests(start_server):
    served, received = start_server(), []

    def join(request):
        received.append(request.data)
        return Joined(wants_files=bool(request.data.left_out))

    served.server.handlers["join"] = join
    data = DataSpec(
        files=tuple(f"s3://bucket/a-folder-of-some-depth/part-{n:06}.tfrecord" for n in range(120_000))
    )
    assert MAX_BODY < len(data.to_json()) < MAX_LIST
    client = CoordinatorClient(served.address, served.credentials, 0, 0, timeout=SECONDS)
    client.join(Join(**client.identity, data=data, batch_size=16))
    client.close()
    assert received == [data.brief(), data]
    assert len(data.brief().to_json()) < 1000
    code, answer = served.ask("POST", "/v1/join", b"", length=MAX_JOIN + 1)
    assert (code, "at most" in answer) == (400, True)


def test_request_for_work_carries_the_stop_that_the_worker_knows(start_server):
    served, received = start_server(), []

    def next_work(request):
        received.append(request)
        return Assignment(kind="idle")

    served.server.handlers["next"] = next_work
    client = CoordinatorClient(served.address, served.credentials, 0, 0, timeout=SECONDS)
    client.next_work(3, 7)
    client.close()
    assert [(request.generation, request.stopped) for request in received] == [(3, 7)]


def test_history_is_whole_whatever_part_of_it_the_coordinator_tells(start_server):
    """It tells the rest of what this worker has of its process and generation; one of an earlier version, all."""
    served, received, answers = start_server(), [], []

    def next_work(request):
        received.append(request.told)
        return answers.pop(0)

    def told(term, since, *losses):
        history = [{"loss": loss} for loss in losses]
        return Assignment(kind="task", task="callbacks", token=(term, 1), since=since, history=history)

    served.server.handlers["next"] = next_work
    client = CoordinatorClient(served.address, served.credentials, 0, 0, timeout=SECONDS)
    histories = []
    for generation, answer in [
        (0, told(5, 0, 3.0, 2.0)),
        (0, Assignment(kind="idle")),
        (0, told(5, 2, 1.0)),
        (0, told(5, 2)),  # the export after an epoch that was not complete
        (0, told(6, 0, 3.0, 2.5)),
        (1, told(6, 0, 3.0)),  # after a rollback
        (1, told(6, 1, 1.5)),
    ]:
        answers.append(answer)
        histories.append([logs["loss"] for logs in client.next_work(generation).history])
    client.close()
    assert received == [(0, 0), (5, 2), (5, 2), (5, 3), (5, 2), (6, 0), (6, 1)]
    assert histories == [[3.0, 2.0], [], [3.0, 2.0, 1.0], [3.0, 2.0], [3.0, 2.5], [3.0], [3.0, 1.5]]


@pytest.mark.parametrize(
    "error", [Fenced("newer"), UserError("fix it"), ProtocolError("no"), Unreachable("later")]
)
def test_errors_keep_their_type_over_http(start_server, error):
    served = start_server()
    served.error = error
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    for _ in range(2):  # also where the first error closed the connection: a new one opens
        with pytest.raises(type(error), match=str(error)):
            client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
    client.close()


def test_a_server_that_waits_says_so_on_the_same_connection(start_server):
    """Each worker asks once a second: a handshake for each would take the processor from what they wait for."""
    served = start_server(waits_for=lambda: "the parameter server reads the storage")
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    connections = set()
    for _ in range(3):
        with pytest.raises(Unreachable, match="reads the storage"):
            client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
        connections.add(client._connection)
    assert None not in connections
    assert len(connections) == 1
    served.server.waits_for = lambda: ""
    assert client.call("next", Next(slot=3, incarnation=0, number=1), Assignment).seconds == 3
    assert {client._connection} == connections
    client.close()


def test_a_server_that_waits_reads_no_upload(start_server):
    """The next request would begin in the middle of it."""
    served = start_server(waits_for=lambda: "the parameter server reads the storage")
    code, _ = served.ask("PUT", f"{FILES}0/0/1/1/a", b"x" * 100)
    assert (code, served.files) == (503, {})
    head = f"PUT {FILES}0/0/1/1/a HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n"
    with served.connect() as client:
        client.sendall(f"{head}Authorization: Bearer {served.credentials.token(PURPOSE)}\r\n\r\n".encode())
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Connection: close" in answer


def test_internal_error_is_logged_and_retryable(start_server, caplog):
    served = start_server()
    served.error = RuntimeError("a bug")
    client = ControlClient(served.address, served.credentials, timeout=SECONDS)
    with pytest.raises(Unreachable, match="500"):
        client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
    client.close()
    assert "a bug" in caplog.text
    served.error = None
    assert served.works()


@contextlib.contextmanager
def answering(tmp_path, answer):
    """A client whose server answers one request with these bytes."""
    credentials = create_secret_dir(tmp_path)
    context = credentials.server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.recv(65536)
                with contextlib.suppress(OSError):  # the client may close before it has read all of it
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = Shard(host="127.0.0.1", control_port=listener.getsockname()[1])
        client = ControlClient(address, credentials, timeout=SECONDS)
        yield client
        thread.join(SECONDS)
        client.close()


@pytest.mark.parametrize("answer", [b"", b'{"kind": "id'])
def test_truncated_response_is_unreachable(tmp_path, answer):
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + answer
    with answering(tmp_path, response) as client, pytest.raises(Unreachable, match="does not answer"):
        client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "response",
    [
        b"\xff" * 100,
        b"HTTP/1.1 x OK\r\n\r\n",
        b"HTTP/1.1 999 No\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"a: b\r\n" * 200 + b"\r\n",
        OK + b"a" * 100_000 + b"\r\n\r\n",
        OK + b"Content-Length: 2\r\n\r\n[]",
        OK + b'Content-Length: 16\r\n\r\n{"kind": "other"',
        OK + b"Content-Length: 4\r\n\r\n\xff\xfe\xff\xfe",
        OK + b"Content-Length: -5\r\n\r\n",
        OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n{}",
    ],
)
def test_any_invalid_response_is_refused(tmp_path, response):
    with answering(tmp_path, response) as client, pytest.raises((ProtocolError, Unreachable)):
        tracemalloc.start()
        try:
            client.call("next", Next(slot=0, incarnation=0, number=1), Assignment)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MAX_ANSWER + (8 << 20)
