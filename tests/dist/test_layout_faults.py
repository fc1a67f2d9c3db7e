"""On any layout, bad gradients of one rank stop all ranks before the update. The LM head does no needless
work. Two equal runs match bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model

_CASES = "tests.dist.layout_cases"
_TP2_CP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2}
_BACKWARD = "all losses are finite: it began in the backward pass"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("layout_faults")
    make_hf_model("qwen3", path)
    return str(path)


@pytest.mark.parametrize(
    ("layout", "poison", "bad", "blamed"),
    [
        (_PP2, {"dp_rank": 1}, [1], "loss of micro-batch 0 of rank 1, samples [1, 3, 5]"),
        (_PP2, {"rank": 0}, [0], _BACKWARD),
        ({"tensor_model_parallel_size": 2}, {"rank": 3}, [1], _BACKWARD),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, {"rank": 1}, [0], _BACKWARD),
    ],
    ids=["pp2-reward", "pp2-first-stage", "tp2", "tp2-cp2"],
)
def test_bad_gradients_anywhere_stop_every_rank_before_the_update(
    layout: dict[str, Any],
    poison: dict[str, int],
    bad: list[int],
    blamed: str,
    hf: str,
    ranks: ForkServer,
    tmp_path: Path,
) -> None:
    args = layout | {"output_dir": str(tmp_path)}
    results = ranks.run(f"{_CASES}:poisoned", 4, hf=hf, batch=make_batch(8), args=args, poison=poison)
    for rank, result in enumerate(results):
        assert f"trainer rank {rank} failed on rollout 3" in result["error"]
        assert f"gradients are NaN or infinite on data-parallel ranks {bad} ({blamed})" in result["error"]
        assert result["is_same"]
    dumps = sorted(path.name for path in (tmp_path / "failed_steps").iterdir())
    assert dumps == [f"rollout_3_rank_{rank}.pt" for rank in range(4)]


def test_such_a_step_is_skipped_on_every_rank_when_the_user_asks_for_it(
    hf: str, ranks: ForkServer, tmp_path: Path
) -> None:
    args = _PP2 | {"output_dir": str(tmp_path), "check_for_nan_in_loss_and_grad": False}
    results = ranks.run(f"{_CASES}:poisoned", 4, hf=hf, batch=make_batch(8), args=args, poison={"rank": 0})
    assert [result["error"] for result in results] == [None] * 4
    assert all(result["is_same"] for result in results)
    (norm,) = [result["grad_norm"] for result in results if result["grad_norm"] is not None]
    assert math.isnan(norm)


@pytest.mark.parametrize(
    ("world_size", "layout", "num_heads", "num_copies"),
    [(1, {}, 1, 1), (2, {"context_parallel_size": 2}, 1, 1), (4, _TP2_CP2, 2, 1), (2, _PP2, 1, 2)],
    ids=["1", "cp2", "tp2-sp-cp2", "pp2"],
)
def test_only_rows_that_predict_response_tokens_go_through_the_head(
    world_size: int, layout: dict[str, Any], num_heads: int, num_copies: int, hf: str, ranks: ForkServer
) -> None:
    batch = make_batch(8)
    counts = ranks.run(f"{_CASES}:head_rows", world_size, hf=hf, batch=batch, args=layout)
    head, layers = (sum(column) for column in zip(*counts, strict=True))
    assert head == num_heads * sum(batch["response_lengths"])
    # With sequence and context parallelism every token is on one rank, plus padding. With pipelining on each stage.
    assert layers >= num_copies * sum(batch["total_lengths"])
    assert head < layers * num_heads


def test_the_same_run_twice_is_the_same_bit_for_bit(hf: str, ranks: ForkServer) -> None:
    arguments = {
        "hf": hf,
        "batch": make_batch(16),
        "num_steps": 2,
        "args": _TP2_CP2 | {"pipeline_model_parallel_size": 2, "global_batch_size": 8, "use_kl_loss": True},
    }
    first, second = (ranks.run(f"{_CASES}:train", 8, **arguments) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["report"].steps == other["report"].steps
        for name, weight in one["weights"].items():
            assert torch.equal(other["weights"][name], weight)
