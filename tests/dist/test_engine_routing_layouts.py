"""The engine's choices of experts, forced on every layout, match a plain loop over those experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import NASTY, PLAIN, Result, assert_equal, assert_replicas_agree, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch, with_shared_prefixes
from tests.verification import verify

_NUM_LAYERS, _DENSE, _NUM_EXPERTS, _TOPK = 4, 1, 8, 2
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine_routing")
    make_family_checkpoint("qwen3_moe", path / "hf", num_hidden_layers=_NUM_LAYERS, mlp_only_layers=[_DENSE])
    return path


def _batch() -> dict[str, Any]:
    """Random experts, different ones for every token and layer: nothing that the routers would choose."""
    batch = make_batch(16, seed=1, lengths=NASTY)
    generator = torch.Generator().manual_seed(8)
    batch["rollout_routed_experts"] = [
        torch.rand(length - 1, _NUM_LAYERS, _NUM_EXPERTS, generator=generator).topk(_TOPK).indices.to(torch.uint8)
        for length in batch["total_lengths"]
    ]
    for experts in batch["rollout_routed_experts"]:
        experts[:, _DENSE] = 99  # must not be read: a dense layer has no experts
    return batch


def _train(ranks: ForkServer, world_size: int, directory: Path, layout: str, **arguments: Any) -> list[Result]:
    settings = PLAIN | {"use_routing_replay": True, "use_rollout_routing_replay": True} | layout_args(layout)
    settings |= {"output_dir": str(directory)} | arguments
    size = settings.pop("size", 3)
    batch = with_shared_prefixes(_batch()) if settings.pop("repeats", False) else _batch()
    case = {"hf": str(directory / "hf"), "batch": batch, "num_steps": 2, "args": settings, "size": size}
    return ranks.run("tests.dist.layout_cases:train", world_size, **case)


@pytest.fixture(scope="module")
def one_rank(ranks: ForkServer, directory: Path) -> Result:
    return main_rank(_train(ranks, 1, directory, ""))


@contextmanager
def _forced(model: Any, experts: torch.Tensor) -> Iterator[None]:
    """The transformers model takes ``experts`` [tokens, layers, topk]. Their scores remain the router's."""
    for number, layer in enumerate(model.model.layers):
        if number != _DENSE:
            router = layer.mlp.gate

            def forward(hidden: torch.Tensor, router: Any = router, number: int = number) -> Any:
                logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), router.weight)
                chosen = experts[:, number].long()
                scores = logits.softmax(-1).gather(1, chosen)
                return logits, scores / scores.sum(-1, keepdim=True), chosen

            router.forward = forward
    yield
    for number, layer in enumerate(model.model.layers):
        if number != _DENSE:
            del layer.mlp.gate.forward


def test_forced_experts_give_the_log_probs_of_transformers_with_the_same_experts(
    one_rank: Result, directory: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32, attn_implementation="sdpa")
    batch = _batch()
    moved = 0.0
    for position, ours in one_rank["log_probs"].items():
        tokens, length = batch["tokens"][position], batch["response_lengths"][position]
        experts = batch["rollout_routed_experts"][position]
        with torch.no_grad():
            with _forced(model, experts):
                logits = model(tokens[None, :-1]).logits[0]
            own = model(tokens[None, :-1]).logits[0]
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[-length:, 0]
        verify("log-probs with the engine's experts", "transformers with these experts", ours, expected, tolerance=1e-5)
        moved = max(moved, float((logits - own).abs().max()))
    assert moved > 0.1, "the routers would have chosen others"


@pytest.mark.parametrize(
    ("world_size", "layout", "arguments"),
    [
        (2, "tp2 sp ep2 etp1", {}),
        (2, "cp2", _RECOMPUTE),
        (2, "ep2", {}),
        (2, "pp2 vpp2 size2", {}),
        (4, "tp2 sp cp2", {}),
    ],
    ids=["tp2-sp-ep2", "cp2-recompute", "ep2", "pp2-vpp2", "tp2-sp-cp2"],
)
def test_every_layout_trains_like_one_rank(
    world_size: int, layout: str, arguments: dict[str, Any], ranks: ForkServer, directory: Path, one_rank: Result
) -> None:
    results = _train(ranks, world_size, directory, layout, **arguments)
    assert_equal(one_rank, results)
    assert_replicas_agree(results)


def test_a_prefix_is_shared_as_far_as_the_engine_chose_the_same_experts(ranks: ForkServer, directory: Path) -> None:
    reference = main_rank(_train(ranks, 1, directory, "size16", repeats=True))
    results = _train(ranks, 2, directory, "tp2 sp ep2 etp1 size8", repeats=True, share_prefixes=True)
    assert_equal(reference, results)
    assert_replicas_agree(results)
