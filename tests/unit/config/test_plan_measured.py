"""Parameters and activations of the plan against models that megatron-core builds and runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.config.plan.memory import stage_memory
from slime.config.plan.placement import read_layout
from slime.config.plan.shape import read_shape
from slime.models.cost import layer_activations
from tests.unit.megatron_utils.test_trainer_numerics import schedule
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, single_rank

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        **EXPERTS,
        **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        "num_key_value_heads": 4,
    },
    "minimax_m2": {**SIZES, "num_experts_per_tok": 2, "num_local_experts": 8},
}
KINDS["glm_moe_dsa"] = KINDS["deepseek_v3"] | {"n_group": 1, "topk_group": 1}


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    with single_rank():
        yield


class _FusedNorm(torch.autograd.Function):
    """Stores what torch's fused norm on a GPU stores: the input. On a CPU torch stores two fp32 copies besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _trainer(kind: str, num_layers: int, path: Path) -> MegatronTrainer:
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=num_layers, **KINDS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    args = make_args(path, fp32=False, bf16=True, world_size=1)
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
    trainer.setup()
    return trainer


def _stored_bytes_per_token(chunk: Any) -> float:
    """Distinct memory that one forward pass keeps for the backward pass, without the parameters."""
    from slime.backends.megatron_utils.model.attention import segments_of
    from slime.backends.megatron_utils.step import run_model
    from slime.backends.training.data import TrainBatch  # after the trainer has prepared megatron for a CPU

    batch = make_batch(8, seed=3, lengths=[(40, 40)] * 8)
    whole = schedule(batch, [list(range(8))], size=8)
    micro_batch = next(TrainBatch(whole, torch.device("cpu")).micro_batches(0))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    stored: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            stored[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_model(chunk, micro_batch, segments_of(micro_batch))
    return sum(storage.nbytes() for storage in stored.values()) / micro_batch.packed.tokens.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_agrees_with_the_model_that_megatron_builds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.nn.RMSNorm, "forward", lambda norm, x: _FusedNorm.apply(x, norm.weight, norm.eps), raising=True
    )
    stored = []
    for num_layers in (1, 2):
        trainer = _trainer(kind, num_layers, tmp_path / str(num_layers))
        chunk = trainer._ready.chunks[0]
        stored.append(_stored_bytes_per_token(chunk))
        shape, layout = read_shape(trainer._args), read_layout(trainer._args)
        (stage,) = stage_memory(trainer._args, shape, layout)
        assert stage.parameters == sum(parameter.numel() for parameter in chunk.parameters())
    estimate = layer_activations(shape, layer=0, width=2)
    assert estimate == pytest.approx(stored[1] - stored[0], rel=0.15)
