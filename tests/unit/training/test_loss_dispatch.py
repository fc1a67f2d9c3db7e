"""From logits to Megatron's (loss, normalizer, metrics): dispatch, scaling, rows, with a fake batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import RankPlace
from slime.backends.training.loss import LossContext, MicroBatchLoss, Objective, micro_batch_loss
from slime.batch.packing import pack

VOCAB = 11
PROMPTS, RESPONSES = [2, 3, 1], [3, 1, 2]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1]), torch.tensor([0, 0])]


@dataclass
class Batch:
    """The part of a rank's batch that the loss reads."""

    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def masks(self, indices: list[int]) -> list[torch.Tensor]:
        return [MASKS[i] for i in indices]

    def mask_sums(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor([float(MASKS[i].sum()) for i in indices])

    def flat(self, name: str, indices: list[int]) -> torch.Tensor | None:
        return torch.cat([self.columns[name][i] for i in indices]) if name in self.columns else None

    def select(self, name: str, indices: list[int]) -> list[Any]:
        assert name == "total_lengths"
        return [PROMPTS[i] + RESPONSES[i] for i in indices]


def micro_batch(indices: list[int]) -> Any:
    g = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (p + r,), generator=g) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    lengths = [RESPONSES[i] for i in indices]
    packed = pack([tokens[i] for i in indices], lengths)
    return SimpleNamespace(
        indices=indices,
        packed=packed,
        response_lengths=lengths,
        sampling=None,
        gather=lambda local: local,
        sharding=Sharding(),
    )


def per_token(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for n in RESPONSES]


def run(
    settings: AlgorithmArgs, scale: tuple[int, int, RankPlace], *, picked: bool = False, **kwargs: Any
) -> MicroBatchLoss:
    """All three samples in one micro-batch, random logits."""
    one = micro_batch([0, 1, 2])
    width = 1 if kwargs.get("is_critic") else VOCAB + 2  # two columns of padding
    rows = one.packed.tokens.shape[1]
    logits = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(3)).requires_grad_()
    columns = {"advantages": per_token(1), "values": per_token(2), "returns": per_token(4)}
    shown = logits[0, one.packed.response_rows] if picked else logits
    batch: Any = Batch(columns)
    out = micro_batch_loss(shown, one, LossContext(Objective(settings, VOCAB, 0.5, **kwargs), batch, *scale))
    (gradient,) = torch.autograd.grad(out.loss, logits)
    return replace(out, log_probs=gradient)  # handed back in the place of the log-probs


ALONE = (1, 1, RankPlace(0, 1, None))  # micro-batches, rollouts


def test_rows_picked_before_the_lm_head_give_the_same_loss_and_gradient() -> None:
    whole, picked = run(AlgorithmArgs(), ALONE), run(AlgorithmArgs(), ALONE, picked=True)
    assert whole.loss == picked.loss
    assert torch.equal(whole.log_probs, picked.log_probs)
    assert torch.all(whole.log_probs[..., VOCAB:] == 0)


def test_the_loss_of_rollout_means_undoes_what_megatron_divides_by() -> None:
    plain = run(AlgorithmArgs(), ALONE)
    scaled = run(AlgorithmArgs(), (4, 6, RankPlace(0, 2, None, cp_size=3)))
    torch.testing.assert_close(scaled.loss, plain.loss * (4 * 2 * 3 / 6))
    torch.testing.assert_close(scaled.log_probs, plain.log_probs * (4 * 2 * 3 / 6))
    assert scaled.num_tokens == 1
    assert scaled.values[0] == 0
    assert torch.equal(scaled.values, plain.values)  # metrics stay sums over the micro-batch's rollouts


def test_the_loss_per_token_hands_megatron_the_trained_tokens() -> None:
    settings = AlgorithmArgs(calculate_per_token_loss=True)
    plain = run(settings, ALONE)
    scaled = run(settings, (4, 6, RankPlace(0, 2, None, cp_size=3)))
    torch.testing.assert_close(scaled.loss, plain.loss * 3)
    assert scaled.num_tokens == plain.num_tokens == 3
    assert scaled.num_tokens.dtype == torch.int32
    assert scaled.values[0] == 3


def test_values_and_names_describe_the_same_metrics() -> None:
    out = run(AlgorithmArgs(), ALONE)
    assert out.names == ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"]
    assert out.values.shape == (1 + len(out.names),)
    assert out.values[1] == pytest.approx(float(out.loss.detach()))


def test_the_critics_loss_reads_the_value_head_without_temperature() -> None:
    out = run(AlgorithmArgs(value_clip=0.1), ALONE, is_critic=True)
    assert out.names == ["value_loss", "value_clipfrac"]
    one = micro_batch([0, 1, 2])
    rows = one.packed.tokens.shape[1]
    head = torch.randn(1, rows, 1, generator=torch.Generator().manual_seed(3))[0, :, 0][one.packed.response_rows]
    old, returns = torch.cat(per_token(2)), torch.cat(per_token(4))
    bounded = old + (head - old).clamp(-0.1, 0.1)
    each = torch.maximum((bounded - returns) ** 2, (head - returns) ** 2)
    wanted = (each[0] + each[2]) / 2 + each[3]
    assert float(out.loss.detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_what_an_objective_lacks_is_named() -> None:
    one = micro_batch([0])
    batch: Any = Batch({})
    logits = torch.zeros(1, one.packed.tokens.shape[1], VOCAB)
    objective = Objective(AlgorithmArgs(), VOCAB)
    with pytest.raises(ValueError, match="needs advantages: drop --disable-compute-advantages-and-returns"):
        micro_batch_loss(logits, one, LossContext(objective, batch, *ALONE))
    with pytest.raises(ValueError, match="the critic needs values and returns"):
        micro_batch_loss(logits, one, LossContext(replace(objective, is_critic=True), batch, *ALONE))
    assert Objective(AlgorithmArgs(loss_type="custom_loss"), VOCAB).needs_all_rows
    assert not objective.needs_all_rows
