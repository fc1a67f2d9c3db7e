"""Differences between two states of a tensor: small, exact, and refused when damaged."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from slime.utils.errors import EngineError
from slime.weight_sync.delta_codec import apply_delta, encode_delta

ENCODINGS = ("xor", "overwrite")


def _states(size: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    where = rng.choice(size, int(size * share), replace=False)
    new[where] ^= rng.integers(1, 256, where.size, dtype=np.uint8)
    return old, new


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("size", "share"), [(1, 1.0), (7, 0.3), (4096, 0.01), (65537, 0.5), (10_000, 1.0), ((2 << 20) + 77, 0.01)]
)
def test_the_old_state_and_the_difference_make_the_new_state(encoding, size, share):
    old, new = _states(size, share)
    packed, num_changed = encode_delta(new, old, encoding)
    assert num_changed == int((old != new).sum())
    apply_delta(old, packed, encoding)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_unchanged_tensor_has_no_difference(encoding):
    old, _ = _states(100, 0)
    assert encode_delta(old.copy(), old, encoding) is None


def test_overwriting_twice_is_the_same_as_once_and_doing_xor_twice_undoes_it():
    old, new = _states(1000, 0.1)
    for encoding, expected in (("overwrite", new), ("xor", old)):
        state = old.copy()
        packed, _ = encode_delta(new, old, encoding)
        apply_delta(state, packed, encoding)
        apply_delta(state, packed, encoding)
        assert np.array_equal(state, expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_percent_of_changed_bytes_takes_less_than_a_tenth(encoding):
    old, new = _states(1 << 20, 0.01)
    packed, _ = encode_delta(new, old, encoding)
    assert len(packed) < (1 << 20) / 10


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("where", [[0, 255, 511], [3, 259, 700], [70_000], [5, 1 << 20, 3 << 20]])
def test_changes_far_from_each_other_arrive_where_they_were_made(encoding, where):
    old, _ = _states((3 << 20) + 5, 0)
    new = old.copy()
    new[where] += 1
    packed, num_changed = encode_delta(new, old, encoding)
    assert num_changed == len(where)
    assert len(packed) < 60, "a few changes are a few bytes"
    apply_delta(old, packed, encoding)
    assert np.array_equal(old, new)


def test_distances_beyond_four_gibibytes_are_read_as_wide_ones():
    target = np.zeros(10, dtype=np.uint8)
    plain = (2 << 8 | 8).to_bytes(8, "little") + np.array([3, 6], dtype="<u8").tobytes() + bytes([5, 6])
    apply_delta(target, b"s" + zstandard.compress(plain), "overwrite")
    assert target.tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 6]


def test_a_difference_in_every_byte_takes_no_more_than_the_tensor():
    old, new = _states(1 << 16, 1.0)
    packed, _ = encode_delta(new, old, "xor")
    assert len(packed) < (1 << 16) * 1.01


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_difference_is_refused(encoding):
    old, new = _states(1000, 0.1)
    packed, _ = encode_delta(new, old, encoding)
    with pytest.raises(EngineError, match="damaged"):
        apply_delta(old.copy(), packed[: len(packed) // 2], encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_difference_of_a_longer_tensor_is_refused(encoding):
    old, new = _states(1000, 1.0)
    packed, _ = encode_delta(new, old, encoding)
    with pytest.raises(EngineError, match=r"of a tensor of 10|(does|do) not fit one of 10 bytes"):
        apply_delta(np.zeros(10, dtype=np.uint8), packed, encoding)


def test_a_difference_whose_size_is_damaged_takes_no_memory_for_it():
    frame = bytearray(zstandard.compress(bytes(300)))  # magic 4 | descriptor 1 | size 2, ...
    frame[4:7] = bytes([frame[4] & 0x3F | 0xC0]) + (1 << 60).to_bytes(8, "little")
    assert zstandard.frame_content_size(bytes(frame)) == 1 << 60
    with pytest.raises(EngineError, match="do not fit one of 10 bytes"):
        apply_delta(np.zeros(10, dtype=np.uint8), b"s" + bytes(frame), "overwrite")


@pytest.mark.parametrize("header", [3 << 8 | 1, 3 << 8 | 3])
def test_a_cut_list_of_changes_is_refused(header):
    plain = header.to_bytes(8, "little") + bytes(12)
    with pytest.raises(EngineError, match="too short or too long for 3 changes"):
        apply_delta(np.zeros(10, dtype=np.uint8), b"s" + zstandard.compress(plain), "overwrite")
