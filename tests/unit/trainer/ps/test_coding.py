"""Statistics keep their exact values on a wire of bf16; trainable values are rounded."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps import shard_client
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, in_memory, place, values
from shoal_trainer.ps.pieces import parts
from shoal_trainer.ps.shard_bounds import GRAIN
from shoal_trainer.security import Credentials
from shoal_trainer.wire.messages import Copy, ModelSpec, OptimizerConfig, Push, PushMeta
from tests.unit.trainer.ps.cluster import Cluster

DTYPES = st.sampled_from((np.float32, np.uint16))


def vector(size: int) -> Any:
    return np.random.default_rng(size).normal(2010, 5, size).astype(np.float32)


@given(st.integers(0, 20), st.integers(0, 20), DTYPES)
def test_statistics_are_exact_and_trainable_values_rounded(trainable: int, rest: int, dtype: Any) -> None:
    before, after = vector(trainable + rest), aligned(trainable + rest)
    array = coded(before.size, trainable, dtype)
    encode(before, array, trainable)
    decode(array, after, trainable)
    np.testing.assert_array_equal(after[trainable:], before[trainable:])
    rounded = 0 if dtype is np.float32 else 2**-8
    np.testing.assert_allclose(after[:trainable], before[:trainable], rtol=rounded)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6), DTYPES)
def test_pieces_of_memory_have_the_values_of_the_array(
    trainable: int, rest: int, length: int, dtype: Any
) -> None:
    array = coded(trainable + rest, trainable, dtype)
    encode(vector(trainable + rest), array, trainable)
    octets = array.view(np.uint8)
    cut = [octets[low : low + 4 * length] for low in range(0, octets.size, 4 * length)]
    pieces = in_memory(cut, trainable, dtype)
    whole = [value for _, part in parts(values(array, trainable)) for value in part]
    assert [value for _, part in parts(pieces) for value in part] == whole
    assert pieces.size == trainable + rest == len(whole)
    assert place(pieces.size, trainable, dtype) == array.size


@pytest.mark.by_day(8)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("trainable", [GRAIN + 7, GRAIN + 8, 2 * GRAIN, 7])
@pytest.mark.parametrize("out", [np.float32, np.uint16])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_round_trip_over_two_shards(
    credentials: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    streams: bool,
    trainable: int,
    out: Any,
    tls: bool,
) -> None:
    """With the boundary in either shard, or between them; into fp32, and as it comes."""
    if streams:
        monkeypatch.setattr(shard_client, "ASK_BYTES", 0)
    size = trainable + GRAIN + 5
    model = ModelSpec(
        fingerprint="f" * 64,
        parameters=trainable,
        statistics=size - trainable,
        optimizer=OptimizerConfig(learning_rate=1.0, batch_size=1),
    )
    cluster = Cluster(credentials, streams=streams, tls=tls).serve(2)
    client = cluster.client(dtype="bf16")
    first, answer, found = vector(size), coded(size, trainable, out), aligned(size)
    client.hello(model, Copy(lambda: first))
    pulled = client.pull(answer)
    decode(answer, found, trainable)
    np.testing.assert_array_equal(found[trainable:], first[trainable:])
    update = coded(size, trainable, np.uint16)
    encode(np.full(size, 0.3, np.float32), update, trainable)
    client.push_pull(update, answer, Push(1, pulled.versions, PushMeta(1)))
    decode(answer, found, trainable)
    np.testing.assert_array_equal(found[trainable:], first[trainable:] + np.float32(0.3))
    np.testing.assert_allclose(found[:trainable], first[:trainable] - 0.3, rtol=2**-8)
    cluster.close()
