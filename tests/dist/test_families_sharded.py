"""Every family on parallel layouts: whole logits equal ``transformers``, and the checkpoint comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import KINDS, is_left_out, make_family_checkpoint, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB
from tests.verification import verify

_CASES = "tests.dist.family_cases"
_DENSE = ["qwen2", "qwen3", "glm4", "mimo", "qwen3_5"]
_MOE = [
    "qwen3_moe",
    "glm4_moe_qk_norm",
    "deepseek_v3",
    "moonlight",
    "minimax_m2",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe",
]
_LENGTHS = [9, 1, 30]
_ONE_EACH, _FEW, _ALL = 1, 20_000, 1 << 30  # bytes of a bucket


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tmp_path_factory.mktemp("families") / kind for kind in (*_DENSE, *_MOE)}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Compute logits by ``transformers`` and make the checkpoints."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in _LENGTHS]
    logits = {}
    for kind, path in checkpoints.items():
        path.mkdir(parents=True)
        model = make_family_checkpoint(kind, path)
        with torch.no_grad():
            logits[kind] = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
    return logits


def _layout(tensor: int = 1, pipeline: int = 1, expert: int = 1, expert_tensor: int | None = None) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor if expert_tensor is None else expert_tensor,
    }


@pytest.mark.parametrize(
    ("kinds", "world_size", "layout"),
    [
        (_DENSE + _MOE, 2, _layout(tensor=2)),
        (_DENSE + _MOE, 2, _layout(pipeline=2)),
        (_MOE, 2, _layout(expert=2)),
        (_MOE, 2, _layout(tensor=2, expert=2, expert_tensor=1)),
        (_MOE, 4, _layout(tensor=2, expert=2, expert_tensor=2)),
        (_DENSE, 4, _layout(tensor=2, pipeline=2)),
        (_MOE, 4, _layout(tensor=2, pipeline=2, expert=2, expert_tensor=1)),
    ],
    ids=["tp2", "pp2", "ep2", "tp2-ep2-etp1", "tp2-ep2-etp2-dp2", "tp2-pp2", "tp2-pp2-ep2"],
)
def test_weights_and_logits_are_the_same_on_every_layout(
    kinds: list[str],
    world_size: int,
    layout: dict[str, int],
    ranks: ForkServer,
    checkpoints: dict[str, Path],
    expected: dict[str, torch.Tensor],
) -> None:
    by_rank = ranks.run(
        f"{_CASES}:round_trip",
        world_size,
        paths=[str(checkpoints[kind]) for kind in kinds],
        layout=layout,
        buckets=[_ONE_EACH, _FEW, _ALL],
        lengths=_LENGTHS,
    )
    for kind in kinds:
        names = [name for name in saved_tensors(checkpoints[kind]) if not is_left_out(name, KINDS[kind][2])]
        for rank, results in enumerate(by_rank):
            for exported in results[kind]["exports"]:
                assert sorted(name for name, _ in exported) == sorted(names), (kind, rank)
                assert [name for name, is_equal in exported if not is_equal] == [], (kind, rank)
        logits = [results[kind]["logits"] for results in by_rank if results[kind]["logits"] is not None]
        assert len(logits) == world_size // layout["pipeline_model_parallel_size"]
        for one in logits:
            verify(f"logits of {kind}, sharded", "transformers", one, expected[kind], tolerance=1e-5)


def test_a_tensor_that_only_one_rank_misses_is_the_error_of_all(
    ranks: ForkServer, checkpoints: dict[str, Path], expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Expert 7 belongs to the second expert-parallel rank. The first must not go on alone."""
    source = checkpoints["qwen3_moe"]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = saved_tensors(source)
    name = "model.layers.0.mlp.experts.7.down_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    errors = ranks.run(f"{_CASES}:load_error", 2, path=str(tmp_path), layout=_layout(expert=2))
    assert all(f"tensor {name} is missing" in error for error in errors)
