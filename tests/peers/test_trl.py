"""Loss and gradient of one fixed batch against TRL's GRPOTrainer, for the objectives that both have.

TRL is an optional peer. Without it these tests are skipped. In a separate environment: ``pip install trl``, then
``python -m pytest tests/peers``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.policy_loss import PolicyTokens, policy_loss
from slime.algorithms.reduce import Samples

pytest.importorskip("trl")

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
LENGTHS = MASK.sum(1).tolist()
ADVANTAGES = torch.tensor([0.7, -1.2, 1.5, -0.4])
MAX_LENGTH = 32


@dataclass(frozen=True)
class Peer:
    """One objective in both vocabularies.

    Attributes:
        trl: attributes of the trainer. ``args`` is a namespace inside it.
        divisor: what turns our sum into TRL's mean.
    """

    settings: AlgorithmArgs
    trl: dict[str, Any]
    divisor: float
    args: dict[str, Any] = field(default_factory=dict)


BATCH, TOKENS = float(len(LENGTHS)), float(sum(LENGTHS))
PER_TOKEN = {"calculate_per_token_loss": True}
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2}
PEERS = {
    "grpo": Peer(AlgorithmArgs(), {"loss_type": "grpo", **CLIP}, BATCH),
    "grpo-clip-high": Peer(
        AlgorithmArgs(eps_clip_high=0.28), {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.28}, BATCH
    ),
    "grpo-kl": Peer(
        AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="k3"),
        {"loss_type": "grpo", "beta": 0.04, **CLIP},
        BATCH,
    ),
    "grpo-unbiased-kl": Peer(
        AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="k3", use_unbiased_kl=True),
        {"loss_type": "grpo", "beta": 0.04, **CLIP},
        BATCH,
        {"use_bias_correction_kl": True},
    ),
    "grpo-dual-clip": Peer(AlgorithmArgs(eps_clip_c=1.4), {"loss_type": "grpo", **CLIP}, BATCH, {"delta": 1.4}),
    "grpo-tis": Peer(
        AlgorithmArgs(use_tis=True, tis_clip=1.1),
        {"loss_type": "grpo", "use_vllm": True, "vllm_importance_sampling_correction": True, **CLIP},
        BATCH,
    ),
    "grpo-opsm": Peer(
        AlgorithmArgs(use_opsm=True, opsm_delta=0.02),
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02, **CLIP},
        BATCH,
    ),
    "dr_grpo": Peer(AlgorithmArgs(**PER_TOKEN), {"loss_type": "dr_grpo", **CLIP}, BATCH * MAX_LENGTH),
    "bnpo": Peer(AlgorithmArgs(**PER_TOKEN), {"loss_type": "bnpo", **CLIP}, TOKENS),
    "dapo": Peer(
        AlgorithmArgs(eps_clip_high=0.28, **PER_TOKEN),
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
        TOKENS,
    ),
    "gspo": Peer(
        AlgorithmArgs(advantage_estimator="gspo", eps_clip=0.03, eps_clip_high=0.04),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        BATCH,
    ),
    "cispo": Peer(
        AlgorithmArgs(advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.2, **PER_TOKEN),
        {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.2},
        TOKENS,
    ),
}


def per_token(seed: int, scale: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(MASK.shape, generator=g) * scale


OLD = -2 + per_token(0, 0.7)
NEW = OLD + per_token(11, 0.3)
REFERENCE = OLD + per_token(2, 0.3)
ENGINE = OLD + per_token(3, 0.2)
ENTROPY = per_token(4, 1.0).abs()


def run_trl(peer: Peer) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """(loss, gradient by log-prob, metrics) of TRL's loss function. The model is replaced by its log-probs."""
    from trl import GRPOTrainer

    leaf = NEW.clone().requires_grad_()
    metrics: dict[str, list[float]] = defaultdict(list)
    accelerator = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
    )
    defaults = {
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (leaf, ENTROPY, None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "accelerator": accelerator,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": metrics},
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
    }
    args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1} | peer.args
    trainer = SimpleNamespace(**(defaults | peer.trl), args=SimpleNamespace(**args))
    ratio = (OLD - ENGINE).exp().clamp(max=peer.settings.tis_clip)
    ids = torch.zeros_like(MASK)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": MASK,
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def run_ours(peer: Peer) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    kept = MASK.bool()
    leaf = NEW.clone().requires_grad_()
    tokens = PolicyTokens(
        log_probs=leaf[kept],
        advantages=ADVANTAGES.unsqueeze(1).expand(MASK.shape)[kept],
        entropy=ENTROPY[kept],
        old_log_probs=OLD[kept],
        rollout_log_probs=ENGINE[kept],
        ref_log_probs=REFERENCE[kept],
    )
    masks = [torch.ones(n, dtype=torch.int32) for n in LENGTHS]
    samples = Samples(
        LENGTHS,
        masks,
        torch.tensor(LENGTHS, dtype=torch.float32),
        per_token=peer.settings.calculate_per_token_loss,
    )
    out = policy_loss(tokens, peer.settings, samples)
    loss = out.loss / peer.divisor
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], out.metrics


@pytest.mark.parametrize("name", PEERS)
def test_loss_and_gradient_equal_those_of_trl(name: str) -> None:
    theirs, their_gradient, _ = run_trl(PEERS[name])
    ours, gradient, _ = run_ours(PEERS[name])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, their_gradient, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0


def test_the_batch_exercises_every_bound() -> None:
    """Otherwise equality would say nothing about clipping."""
    plain = run_ours(PEERS["grpo"])[1]
    different = {name: not torch.allclose(run_ours(peer)[1], plain, atol=1e-6) for name, peer in PEERS.items()}
    assert [name for name, is_different in different.items() if not is_different] == ["grpo"]
