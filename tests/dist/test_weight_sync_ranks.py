"""Several trainer ranks hand weights to the engines on their own devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import ForkServer

_CASE = "tests.dist.weight_sync_cases:send_to_colocated"
_DELTAS = "tests.dist.weight_sync_cases:send_deltas"
_EXPECTED = {f"w{index}": [float(value + index) for value in range(8)] for index in range(3)}


def _run(ranks: ForkServer, **arguments: Any) -> list[dict[str, Any]]:
    return ranks.run(_CASE, 4, timeout_s=600, **arguments)


def _held(seen: dict[str, Any], version: str, slot: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sent_version, sent_slot, tensors in seen["opened"]:
        if (sent_version, sent_slot) == (version, slot):
            assert not found.keys() & tensors.keys(), "sent twice"
            found |= tensors
    return found


@pytest.mark.parametrize("engines", [[(0, 2), (2, 2)], [(0, 1), (1, 3)], [(2, 1)]], ids=["even", "uneven", "one"])
def test_every_device_of_every_engine_opens_every_tensor_once(
    ranks: ForkServer, engines: list[tuple[int, int]]
) -> None:
    seen = _run(ranks, engines=engines)
    for first, count in engines:
        for slot in range(count):
            for version in ("1", "2"):
                assert _held(seen[first], version, slot) == _EXPECTED
    speakers = {first for first, _ in engines}
    assert [bool(one["opened"]) for one in seen] == [rank in speakers for rank in range(4)]
    assert all(one["errors"] == [] for one in seen)
    only_source = ("pause_generation", "begin_weight_update", "end_weight_update", "continue_generation")
    for rank, one in enumerate(seen):
        assert [verb for verb in one["verbs"] if verb in only_source] == list(only_source) * 2 * (rank == 0)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("memory", "EngineError: trainer rank 1: no shared memory"),
        ("engine", "EngineError: wrong shape"),
        ("far", "EngineError: wrong shape"),
        ("flush", "EngineSilent: no answer"),
    ],
)
def test_a_failure_anywhere_ends_the_session_everywhere_and_the_next_update_works(
    ranks: ForkServer, fails: str, message: str
) -> None:
    seen = _run(ranks, engines=[(0, 2), (2, 2)], fails=fails)
    assert [one["errors"] for one in seen] == [[message]] * 4
    assert seen[0]["verbs"].index("end_weight_update") < seen[0]["verbs"].index("continue_generation")
    assert seen[0]["verbs"].count("continue_generation") == 2
    assert [one["gathered"] for one in seen] == [6] * 4
    for first in (0, 2):
        assert _held(seen[first], "2", 1) == _EXPECTED


@pytest.mark.parametrize("changed_only", [False, True])
def test_the_devices_of_an_engine_that_divides_experts_get_those_of_their_block(
    ranks: ForkServer, changed_only: bool
) -> None:
    """With --update-weight-changed-only every device gets all, as the ranks must leave out the same tensors."""
    seen = _run(ranks, engines=[(0, 2), (2, 2)], num_experts=4, expert_blocks=2, changed_only=changed_only)
    for first in (0, 2):
        for slot in (0, 1):
            block = range(4) if changed_only else range(2 * slot, 2 * slot + 2)
            experts = {f"expert{number}": [float(value + number) for value in range(4)] for number in block}
            assert _held(seen[first], "1", slot) == _EXPECTED | experts
    assert all(one["errors"] == [] for one in seen)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_ranks_keep_a_share_of_the_last_version_each_and_publish_the_changes_of_one_rank(
    ranks: ForkServer, tmp_path: Path, encoding: str
) -> None:
    first, *others = ranks.run(_DELTAS, 4, timeout_s=600, folder=str(tmp_path), encoding=encoding)
    assert first["versions"] == first["alone"]
    assert [manifest["base"] for manifest, *_ in first["versions"]] == [None, 0, 1, 2]
    assert [len(changes) for _, changes, _ in first["versions"]] == [7, 7, 7, 0]
    assert first["share"] == first["alone_share"] == 0
    kept = [one["kept"] for one in (first, *others)]
    whole = first["alone_kept"]
    assert whole == 4 * 8000
    # the largest tensor has three eighths of the bytes
    assert kept == [[4 * size] * 4 for size in (3000, 2500, 1000 + 64 + 36, 900 + 500)]


def test_a_rank_that_cannot_write_its_changes_ends_the_update_and_the_next_version_is_full(
    ranks: ForkServer, tmp_path: Path
) -> None:
    seen = ranks.run(_DELTAS, 4, timeout_s=600, folder=str(tmp_path), encoding="xor", failing=2)
    others = ["EngineError: disk full"]
    assert [one["errors"] for one in seen] == [others, others, ["OSError: disk full"], others]
    assert [one["kept"][2] for one in seen] == [None] * 4
    assert [manifest["base"] for manifest, *_ in seen[0]["versions"]] == [None, 0, None]
