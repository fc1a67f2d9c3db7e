"""Weights that only some trainer ranks need: who gets which tensors, bit for bit, and who receives no bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime.backends import EVERY_RANK, SOURCE, Recipients
from tests.dist.ranks import ForkServer
from tests.dist.test_families_sharded import _ALL, _FEW, _ONE_EACH, _layout
from tests.unit.megatron_utils.tiny_families import KINDS, is_left_out, make_family_checkpoint, saved_tensors

_KINDS = ["qwen3_moe", "deepseek_v3"]
_BUCKETS = [_ONE_EACH, _FEW, _ALL]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp("recipients") / kind for kind in _KINDS}
    for kind, path in made.items():
        path.mkdir()
        make_family_checkpoint(kind, path)
    return made


def _names(path: Path, kind: str, experts: range | None = None) -> list[str]:
    found = [name for name in saved_tensors(path) if not is_left_out(name, KINDS[kind][2])]
    number = {name: int(match[1]) for name in found if (match := _EXPERT.search(name))}
    return sorted(name for name in found if experts is None or name not in number or number[name] in experts)


def _blocks(count: int, world_size: int) -> Recipients:
    """Engines of ``count`` devices each, which divide the experts among all of them. The last rank has no engine."""
    return Recipients(blocks=(*((rank % count, count) for rank in range(world_size - 1)), None))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, _layout(expert=2)),
        (4, _layout(tensor=2, pipeline=2)),
        (4, _layout(pipeline=2, expert=2)),
        (4, _layout(tensor=2, expert=2, expert_tensor=2)),
        (4, _layout(tensor=2, expert=2, expert_tensor=1)),
        (3, _layout()),
    ],
    ids=["ep2", "tp2-pp2", "pp2-ep2", "tp2-ep2-etp2", "tp2-ep2-etp1-dp2", "dp3"],
)
def test_each_rank_gets_its_tensors_and_no_others(
    world_size: int, layout: dict[str, int], ranks: ForkServer, checkpoints: dict[str, Path]
) -> None:
    by_rank = ranks.run(
        "tests.dist.family_cases:exports_to",
        world_size,
        paths=[str(checkpoints[kind]) for kind in _KINDS],
        layout=layout,
        recipients=[EVERY_RANK, SOURCE, _blocks(2, world_size), _blocks(4, world_size)],
        buckets=_BUCKETS,
    )
    for rank, results in enumerate(by_rank):
        runs = iter(results)
        for kind in _KINDS:
            path, last = checkpoints[kind], rank == world_size - 1
            whole = _names(path, kind)
            block = {count: range(0) if last else _part(rank, count, kind) for count in (2, 4)}
            expected: Sequence[list[str]] = [
                whole,
                whole if rank == 0 else [],
                _names(path, kind, block[2]),
                _names(path, kind, block[4]),
            ]
            bytes_of: list[int] = []
            for names in expected:
                for _ in _BUCKETS:
                    exported, num_received = next(runs)
                    assert sorted(name for name, *_ in exported) == names, (kind, rank)
                    assert [name for name, is_equal, _ in exported if not is_equal] == [], (kind, rank)
                    bytes_of.append(num_received)
            every, source, by_block = (bytes_of[index * len(_BUCKETS)] for index in (0, 1, 3))
            assert source <= every
            assert by_block <= every
            copies = world_size // (layout["tensor_model_parallel_size"] * layout["pipeline_model_parallel_size"])
            if layout["expert_model_parallel_size"] == 1 and rank >= world_size // copies:
                assert source == 0, "another data-parallel copy"


def _part(rank: int, count: int, kind: str) -> range:
    total = 8
    return range(rank % count * total // count, (rank % count + 1) * total // count)


def test_the_ranks_of_an_engine_get_tensors_of_the_same_sizes_in_the_same_order(
    ranks: ForkServer, checkpoints: dict[str, Path]
) -> None:
    """They then fill their buckets at the same tensors, and meet for each of them."""
    by_rank = ranks.run(
        "tests.dist.family_cases:exports_to",
        4,
        paths=[str(checkpoints[kind]) for kind in _KINDS],
        layout=_layout(pipeline=2, expert=2),
        recipients=[Recipients(blocks=tuple((rank, 4) for rank in range(4)))],
        buckets=_BUCKETS,
    )
    for of_ranks in zip(*by_rank, strict=True):
        sizes = [[num_bytes for *_, num_bytes in exported] for exported, _ in of_ranks]
        assert all(one == sizes[0] for one in sizes)
        assert len({tuple(name for name, *_ in exported) for exported, _ in of_ranks}) == 4
