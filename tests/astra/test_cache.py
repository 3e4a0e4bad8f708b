"""Stored counts: canonical shapes, files, replay."""

import pytest

from emu.backends.astra.counts import CountStore, fingerprint, shape_key
from emu.errors import InputError, RunError
from emu.latency.base import BatchShape
from emu.network.dimensions import NetworkDim

MIXED = BatchShape(
    prefill_new=[300, 20], prefill_context=[0, 16], decode_count=2, decode_context_sum=30,
    decode_context_max=20, decode_context_min=10, sequences=4,
)  # fmt: skip
DECODE = BatchShape(
    decode_count=1, decode_context_sum=9, decode_context_max=9, decode_context_min=9, sequences=1
)


def test_shapes_that_cost_the_same_are_one():
    other = BatchShape(
        prefill_new=[20, 300], prefill_context=[16, 0], decode_count=2, decode_context_sum=30,
        decode_context_max=20, decode_context_min=10, sequences=4,
    )  # fmt: skip
    assert shape_key(MIXED) == shape_key(other)
    assert shape_key(MIXED) == "p=20@16+300@0 d=2x30[10,20] n=4 pad=0 l=0:-1"
    assert shape_key(DECODE) == "p=- d=1x9[9,9] n=1 pad=0 l=0:-1"


def test_counts_survive_the_file(tmp_path):
    path = tmp_path / "deep/counts.sqlite"
    with CountStore(path, "a") as store:
        assert store.get(MIXED) is None
        store.put(MIXED, (5, 7))
        assert store.get(MIXED) == (5, 7)
        assert (store.hits, store.misses) == (1, 1)
    with CountStore(path, "a", must_exist=True) as store:
        assert store.require(MIXED) == (5, 7)
        assert len(store) == 1
    with CountStore(path, "b") as store:
        assert store.get(MIXED) is None


def test_replay_says_which_shape_is_missing(tmp_path):
    path = tmp_path / "counts.sqlite"
    with CountStore(path, "a") as store:
        store.put(MIXED, (5,))
        with pytest.raises(RunError, match=r"no count for the batch p=- d=1x9\[9,9\] n=1"):
            store.require(DECODE)
    with (
        CountStore(path, "b") as store,
        pytest.raises(RunError, match="it has 1 for other systems"),
    ):
        store.require(DECODE)


def test_wrong_files_are_input_errors(tmp_path):
    with pytest.raises(InputError, match=r"latency.replay: no such file"):
        CountStore(tmp_path / "none", "a", must_exist=True)
    (tmp_path / "text").write_text("this is not a database, but long enough to look at" * 20)
    with pytest.raises(InputError, match="not a file of counts"):
        CountStore(tmp_path / "text", "a")


def test_fingerprints_tell_systems_apart():
    one, two = (NetworkDim(npus=2, gib_per_s=rate, latency_ns=5) for rate in (16.0, 17.0))
    assert fingerprint("llama", (one,)) == fingerprint("llama", (one,))
    assert fingerprint("llama", (one,)) != fingerprint("llama", (two,))
