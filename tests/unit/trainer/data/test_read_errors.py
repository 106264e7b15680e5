"""An error is reported by its cause, wherever TensorFlow puts it."""

import errno
import socket
import urllib.error

import aiohttp
import numpy as np
import pytest
import tensorflow as tf
from botocore.exceptions import EndpointConnectionError
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.data.read_errors import cause, is_network_outage, is_outage, summary

WAY = """Graph execution error:

Detected at node loss/Loss defined at (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main

  File "/app/job.py", line 3, in call

"""
NODE = "\n\t [[{{node loss/Loss}}]] [Op:__inference_body_362]"


@tf.function
def looked_up(labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.zeros((2, 10)))


def test_graph_error_is_reduced_to_its_cause():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        looked_up(tf.constant([3, 10]))
    assert summary(caught.value).startswith(
        "Received a label value of 10 which is outside the valid range of [0, 10)"
    )
    assert "node" not in summary(caught.value)


def test_autograph_error_is_reduced_to_its_cause():
    def parse(_number):
        return tf.ensure_shape(tf.constant("a"), [64])

    with pytest.raises(ValueError, match="in user code") as caught:
        tf.data.Dataset.range(3).map(parse)
    assert summary(caught.value).startswith("ValueError: Shape must be rank 1 but is rank 0")


def test_python_error_in_a_dataset_is_reduced_to_its_cause():
    text = (
        WAY + "KeyError: 'label'\nTraceback (most recent call last):\n\n"
        '  File "/app/job.py", line 9, in rows\n    yield row["label"]\n\nKeyError: \'label\'\n\n' + NODE
    )
    assert cause(text) == "KeyError: 'label'"


def test_first_of_several_errors_is_the_cause():
    text = (
        "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  no such label"
        + NODE
        + "\n  (1) INVALID_ARGUMENT: x"
    )
    assert cause(WAY + text) == "no such label"
    assert cause(WAY.replace("  File", "<stack traces unavailable>\n  File") + text) == "no such label"


@given(text=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1), node=st.booleans())
def test_text_after_the_traceback_is_the_cause(text, node):
    if text.startswith(("File", "[[{{node")) or "[[{{node" in text:
        return
    assert cause(WAY + text + NODE * node) == text


@pytest.mark.parametrize("text", ["Graph execution error:", WAY, WAY + NODE])
def test_error_without_cause_keeps_its_first_line(text):
    assert cause(text) in {"Graph execution error:"}


def test_other_errors_keep_their_text():
    assert summary(KeyError("label")) == "'label'"
    assert summary(ValueError("first\nsecond")) == "first"
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(np.zeros(3, np.float32), [2])
    assert summary(caught.value).startswith("Input to reshape is a tensor with 3 values")


def from_cause(error, cause):
    error.__cause__ = cause
    return error


def of_library(name, *above, words=""):
    """An error of a library that isn't here, by the names of its classes."""
    kind = Exception
    for each in reversed((name, *above)):
        kind = type(each, (kind,), {})
    return kind(words)


OF_NETWORK = [
    ConnectionResetError(104, "reset"),
    TimeoutError("late"),
    socket.gaierror(-3, "Temporary failure in name resolution"),
    OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ESTALE, "Stale file handle"),
    urllib.error.URLError(ConnectionRefusedError(111, "refused")),
    urllib.error.URLError(socket.gaierror(-2, "no name")),
    urllib.error.HTTPError("http://a", 503, "Service Unavailable", {}, None),
    EndpointConnectionError(endpoint_url="x"),
    aiohttp.ClientPayloadError("not completed"),
    of_library("ReadTimeout", "Timeout", "RequestException"),
    of_library("HTTPError", "RequestException", words="429 Client Error: Too Many Requests for url: x"),
    of_library("MaxRetryError", "RequestError", "PoolError", "HTTPError"),
    of_library("ConnectError", "NetworkError", "TransportError", "RequestError", "HTTPError"),
    from_cause(RuntimeError("shard 3"), ConnectionResetError(104, "reset")),
]
FINAL = [
    urllib.error.HTTPError("http://a", 404, "Not Found", {}, None),
    urllib.error.URLError("unknown url type: foo"),
    of_library("HTTPError", "RequestException", words="404 Client Error: Not Found for url: http://a:500"),
    FileNotFoundError(2, "No such file"),
    PermissionError(13, "denied"),
    KeyError("label"),
    from_cause(KeyError("label"), ValueError("503")),
]


def in_a_data_set(error):
    def rows():
        raise error
        yield

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))
    with pytest.raises(tf.errors.OpError) as caught:
        next(iter(dataset))
    return caught.value


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("errors", "away"), [(OF_NETWORK, True), (FINAL, False)])
@pytest.mark.parametrize("seen", [lambda error: error, in_a_data_set], ids=["raised", "in a data set"])
def test_what_a_network_error_is_depends_neither_on_the_library_nor_on_where_it_is_raised(errors, away, seen):
    assert [repr(each) for each in errors if is_network_outage(seen(each)) != away] == []
    if away:
        assert [repr(each) for each in errors if not is_outage(seen(each))] == []


def test_an_error_while_a_network_error_is_handled_is_its_consequence():
    """As that of `keras.utils.get_file`, which is an `Exception`."""

    def failing():
        try:
            raise urllib.error.URLError(TimeoutError("timed out"))
        except urllib.error.URLError as error:
            raise Exception(f"URL fetch failure: {error.reason}")  # noqa: B904

    with pytest.raises(Exception, match="fetch") as caught:
        failing()
    assert is_network_outage(caught.value)
