"""--recompute-loss-function: the same gradient, and nothing but the logits kept for it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.training.credit import CustomFunctions
from slime.backends.training.data import RankPlace, TrainBatch
from slime.backends.training.loss import LossContext, MicroBatchLoss, Objective, micro_batch_loss
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_batch

ALONE = (1, 8, RankPlace(0, 1, None))  # micro-batches, rollouts


def gradient_of(
    settings: AlgorithmArgs, *, recompute: bool, is_critic: bool = False, custom: CustomFunctions | None = None
) -> tuple[MicroBatchLoss, torch.Tensor]:
    """The loss of the first micro-batch of random logits, and their gradient."""
    columns = make_batch()
    for seed, name in enumerate(("advantages", "values", "returns")):
        generator = torch.Generator().manual_seed(seed)
        columns[name] = [torch.randn(n, generator=generator) for n in columns["response_lengths"]]
    batch = TrainBatch(columns, torch.device("cpu"))
    micro_batch = next(batch.micro_batches(0, all_rows=True))
    shape = (1, micro_batch.packed.tokens.shape[1], 1 if is_critic else VOCAB)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(9), requires_grad=True)
    objective = Objective(
        settings, VOCAB, 0.7, custom=custom or CustomFunctions(), is_critic=is_critic, recompute=recompute
    )
    loss = micro_batch_loss(logits, micro_batch, LossContext(objective, batch, *ALONE))
    (gradient,) = torch.autograd.grad(loss.loss, logits)
    return loss, gradient


@pytest.mark.parametrize(
    ("settings", "is_critic"),
    [
        (AlgorithmArgs(entropy_coef=0.1), False),
        (AlgorithmArgs(loss_type="sft_loss", log_probs_chunk_size=2), False),
        (AlgorithmArgs(), True),
    ],
    ids=["policy", "sft", "critic"],
)
def test_a_recomputed_loss_has_the_same_gradient_bit_for_bit(settings: AlgorithmArgs, is_critic: bool) -> None:
    loss, gradient = gradient_of(settings, recompute=False, is_critic=is_critic)
    again, recomputed = gradient_of(settings, recompute=True, is_critic=is_critic)
    assert gradient.any()
    assert torch.equal(recomputed, gradient)
    assert torch.equal(again.loss, loss.loss)
    assert torch.equal(again.values, loss.values)


def test_a_recomputed_loss_of_the_user_keeps_no_copy_of_the_logits() -> None:
    def confidence(args: Namespace, batch: Any, logits: torch.Tensor, reduce: Any) -> tuple[torch.Tensor, Any]:
        return logits.log_softmax(-1).exp().square().sum(), {}

    custom = CustomFunctions(args=Namespace(custom_loss_function_path="f"), loss=confidence)

    def kept(*, recompute: bool) -> tuple[int, torch.Tensor]:
        """(tensors of the logits' size that the forward pass keeps, gradient)"""
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: _noted(saved, sizes), lambda saved: saved):
            _, gradient = gradient_of(AlgorithmArgs(loss_type="custom_loss"), recompute=recompute, custom=custom)
        return sizes.count(gradient.numel()), gradient

    (num_kept, gradient), (num_kept_again, recomputed) = kept(recompute=False), kept(recompute=True)
    assert num_kept >= 2  # results of log_softmax and exp
    assert num_kept_again == 1  # the logits, which the model holds anyway
    assert torch.equal(recomputed, gradient)


def _noted(saved: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    sizes.append(saved.numel())
    return saved
