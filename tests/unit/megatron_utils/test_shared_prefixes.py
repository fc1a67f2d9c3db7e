"""``--share-prefixes`` changes no number: models, passes and objectives against the same samples apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronCritic, MegatronTrainer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import (
    make_args,
    make_batch,
    schedule,
    weights_of,
    with_sampling_sets,
    with_shared_prefixes,
)

pytestmark = pytest.mark.usefixtures("trainer_rank")

_AUX = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.2],
    "moe_z_loss_coeff": 0.1,
}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# With this rate the second step has adapters far from zero.
_LORA = {"lora_rank": 4, "lora_alpha": 6.0, "lr": 1.0}
_MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _batch(**settings: Any) -> dict[str, Any]:
    batch = with_shared_prefixes(make_batch(16, seed=2))
    if "rollout_top_p" in settings:
        batch = with_sampling_sets(batch)
    return schedule(batch, [list(range(8)), list(range(8, 16))], size=8) | {"global_batch_sizes": [8, 8]}


def _trained(path: Path, batch: dict[str, Any], *, is_critic: bool = False, **settings: Any) -> dict[str, Any]:
    args = make_args(
        path, **{"lr": 1e-3, "entropy_coef": 0.1, "optimizer": "sgd", "data_pad_size_multiplier": 8} | settings
    )
    trainer: Any
    if is_critic:
        trainer = MegatronCritic(args, rank=0, world_size=1)
    else:
        trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=bool(settings.get("use_kl_loss")))
    trainer.setup()
    kept = _keep_gradients(trainer)
    rows = _count_rows(trainer)
    if is_critic:
        report, values = trainer.train_values(0, dict(batch))
    else:
        values = trainer._log_probs(trainer._train_batch(batch))
        report = trainer.train(0, dict(batch))
    return {
        "values": torch.cat(values),
        "steps": [dict(step) for step in report.steps],
        "gradients": kept,
        "weights": weights_of(trainer),
        "rows": rows[0],
    }


def _keep_gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    kept: list[dict[str, torch.Tensor]] = []
    state = trainer._ready
    update = state.optimizer.step

    def step() -> Any:
        named = [pair for chunk in state.chunks for pair in chunk.named_parameters()]
        kept.append({name: one.main_grad.clone() for name, one in named if one.requires_grad})
        return update()

    state.optimizer.step = step
    return kept


def _count_rows(trainer: Any) -> list[int]:
    """Rows that pass the first layer, in all passes."""
    from slime.backends.megatron_utils.model.gpt import unwrap

    rows = [0]

    def count(layer: Any, inputs: Any, output: Any) -> None:
        rows[0] += output[0].shape[0]

    unwrap(trainer._ready.chunks[0]).decoder.layers[0].register_forward_hook(count)
    return rows


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {"use_kl_loss": True, "kl_loss_coef": 0.1}),
        ("qwen3", {"calculate_per_token_loss": True, "rollout_top_p": 0.9}),
        ("qwen3", {"recompute_loss_function": True, "log_probs_chunk_size": 5}),
        ("qwen3", _LORA),
        ("qwen3", {"is_critic": True, "advantage_estimator": "ppo"}),
        ("qwen3", {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 512, "log_probs_max_tokens_per_gpu": 120}),
        ("qwen2", {"advantage_estimator": "gspo", "use_tis": True, "use_rollout_logprobs": False}),
        ("glm4", {}),
        ("qwen3_moe", _AUX),
        ("qwen3_moe", {**_AUX, **_FULL, "calculate_per_token_loss": True}),
        ("qwen3_moe", {**_AUX, **_MOE}),
        ("qwen3_moe", {"use_routing_replay": True}),
        ("qwen3_moe", _LORA),
        ("deepseek_v3", {"moe_router_bias_update_rate": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_losses_gradients_and_weights_are_those_of_separate_samples(
    kind: str, settings: dict[str, Any], checkpoints: Path
) -> None:
    path = checkpoints / kind
    if not path.exists():
        make_family_checkpoint(kind, path)
    batch = _batch(**settings)
    apart = _trained(path, batch, **settings)
    shared = _trained(path, batch, share_prefixes=True, **settings)
    assert shared["rows"] < 0.8 * apart["rows"]
    torch.testing.assert_close(shared["values"], apart["values"], rtol=1e-6, atol=1e-6)
    assert len(shared["steps"]) == len(apart["steps"]) == 2
    for ours, theirs in zip(shared["steps"], apart["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    for ours, theirs in zip(shared["gradients"], apart["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            largest = float(theirs[name].abs().max())
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6 * (1 + largest))
    for name, value in shared["weights"].items():
        torch.testing.assert_close(value, apart["weights"][name], rtol=0, atol=1e-6)
