import numpy as np
import pytest

from benchmarks.kernel_peers import Blocked, TensorFlow
from benchmarks.kernels import STATE_BYTES, ours

SIZE = 70_000  # more than a block


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
@pytest.mark.parametrize("peer", [Blocked, TensorFlow])
def test_peers_compute_the_same_updates_as_the_kernels(peer, encoding):
    gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    if encoding == "bf16":
        gradient = (gradient.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    names = set(STATE_BYTES) - ({"adamw"} if peer is TensorFlow else set())
    assert set(peer(gradient).steps()) == names
    for name in sorted(names):
        other = peer(gradient)
        w, m, v = (np.full(SIZE, value, np.float32) for value in (0.1, 0.0, 1.0))
        for _ in range(2):
            ours(w, m, v, gradient.copy())[name]()
            other.steps()[name]()
        np.testing.assert_allclose(w, np.asarray(other.w), rtol=2e-5, atol=1e-7, err_msg=name)


def test_a_read_after_the_op_copies_the_new_parameters():
    gradient = np.ones(SIZE, np.float32)
    peer, out = TensorFlow(gradient), np.zeros(SIZE, np.float32)
    for _ in range(2):
        before = peer.w.numpy()
        peer.steps_with_read(out)["momentum"]()
        assert np.array_equal(out, peer.w.numpy())
        assert not np.array_equal(out, before)
