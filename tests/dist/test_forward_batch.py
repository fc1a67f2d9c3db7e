"""Passes without gradients in separate micro-batches get the inputs that they would get in the training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {}),
    "data": (2, 1, {}),
    "pipeline": (2, 1, {"pipeline_model_parallel_size": 2}),
    "interleaved": (
        2,
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_vp_stage": 2,
        },
    ),
    "context": (2, 1, {"context_parallel_size": 2}),
}
CASE = "tests.dist.forward_batch_cases:both_passes"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("forward_batch")
    make_hf_model("qwen3", path, num_hidden_layers=4)
    return str(path)


def uneven() -> dict[str, Any]:
    """Eight samples. With two data-parallel ranks, one has all the long ones."""
    batch = make_batch(8, seed=1, lengths=[(3, 25) if i % 2 else (2, 2) for i in range(8)])
    assert [len(tokens) for tokens in batch["tokens"]] == [4, 28] * 4
    return batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_do_not_depend_on_the_limit_of_their_pass(ranks: ForkServer, hf: str, layout: str) -> None:
    world_size, multiple, args = LAYOUTS[layout]
    results = ranks.run(CASE, world_size, hf=hf, batch=uneven(), args=args, own=60)
    for result in results:
        for one, other in zip(result["shared"], result["separate"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert result["num_steps"] == 1
        assert 1 < len(result["tokens"]) < 8
        assert len(result["tokens"]) % multiple == 0
        assert max(result["tokens"]) <= 60 * args.get("context_parallel_size", 1)
    assert len({len(result["tokens"]) for result in results}) == 1  # experts and stages of several ranks work together


def test_ranks_with_too_few_samples_keep_the_micro_batches_of_the_steps(ranks: ForkServer, hf: str) -> None:
    batch = make_batch(3, seed=1, lengths=[(2, 2), (30, 25), (30, 25)])
    args = {"pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 4}
    results = ranks.run(CASE, 2, hf=hf, batch=batch, args=args, own=60)
    assert all(result["tokens"] == [4, 55, 55] for result in results)
