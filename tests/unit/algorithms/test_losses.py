"""The parts of the losses: clipping, KL estimators, reducers, credit of GRPO, supervised loss."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from slime.algorithms import CreditData
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.credit import group_relative
from slime.algorithms.policy_loss import approx_kl, importance_ratio, sft_loss
from slime.algorithms.ppo import clipped_surrogate
from slime.algorithms.reduce import count_tokens, make_reducer, segment_sum

LENGTHS = [3, 1, 4, 2]
MASKS = [[1, 1, 0], [1], [0, 1, 1, 1], [0, 0]]  # the last sample is fully masked
DENOMINATORS = [5, 1, 5, 0]  # samples 0 and 2 are one rollout


def masks() -> list[torch.Tensor]:
    return [torch.tensor(m, dtype=torch.int32) for m in MASKS]


def reducer(per_token: bool = False):
    return make_reducer(LENGTHS, masks(), torch.tensor(DENOMINATORS, dtype=torch.float32), per_token=per_token)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.28, 1.0),  # gain is capped at 1 + eps_clip_high
        (1.5, -1.0, 1.5, 0.0),  # loss is not
        (0.5, 1.0, -0.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
        (5.0, -1.0, 3.0, 0.0),  # dual clip
        (1.0, 2.0, -2.0, 0.0),
    ],
)
def test_surrogate_clips_where_the_paper_says(ratio, advantage, loss, clipped):
    value, fraction = clipped_surrogate(torch.tensor([-math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.28, 3.0)
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert fraction.item() == clipped


def test_dual_clip_at_or_below_one_is_rejected():
    with pytest.raises(ValueError, match="eps-clip-c"):
        clipped_surrogate(torch.zeros(1), torch.ones(1), 0.2, 0.2, 1.0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl_divergence(kind):
    g = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(6, generator=g, dtype=torch.float64), 0) for _ in range(2))
    mean = (p * approx_kl(p.log(), q.log(), kind).double()).sum()
    assert mean.item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_k2_has_the_gradient_of_the_reverse_kl_and_k1_has_none():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(6, generator=g, dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - q)).sum(), logits, retain_graph=True)
    weights = log_p.detach().exp()
    grads = {
        kind: torch.autograd.grad((weights * approx_kl(log_p, q, kind)).sum(), logits, retain_graph=True)[0]
        for kind in ("k1", "k2")
    }
    torch.testing.assert_close(grads["k2"], exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grads["k1"], torch.zeros(6, dtype=torch.float64), atol=1e-6, rtol=0)


def test_low_var_kl_is_clamped_after_the_importance_ratio():
    log_probs, base = torch.tensor([-20.0, -1.0]), torch.tensor([0.0, -1.5])
    assert approx_kl(log_probs, base, "low_var_kl")[0] == 10.0
    weighted = approx_kl(log_probs, base, "low_var_kl", torch.tensor([1.0, 1e4]))
    assert weighted[1] == 10.0
    assert approx_kl(log_probs, base, "k3")[0] > 1e6


def test_unknown_kl_type_names_the_flag():
    with pytest.raises(ValueError, match="--kl-loss-type 'k4'"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_importance_ratio_is_new_over_old():
    assert importance_ratio(torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.3)])).item() == pytest.approx(2.0)


def test_grpo_credits_every_token_with_the_reward_of_its_response():
    settings = AlgorithmArgs()
    credit = group_relative(CreditData([0.5, -1.0, 2.0], [2, 0, 1], []), [], settings)
    assert [a.tolist() for a in credit.advantages] == [[0.5, 0.5], [], [2.0]]
    assert [a.dtype for a in credit.returns] == [torch.float32] * 3
    with pytest.raises(ValueError, match="zip"):
        group_relative(CreditData([1.0], [1, 2], []), [], settings)


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_loss_is_the_negative_log_likelihood_of_the_trained_tokens(per_token):
    log_probs = -torch.rand(sum(LENGTHS), requires_grad=True)
    loss = sft_loss(log_probs, reducer(per_token)).loss
    wanted, position = 0.0, 0
    for mask, denominator in zip(MASKS, DENOMINATORS, strict=True):
        for m in mask:
            wanted -= m * log_probs[position].item() / (1 if per_token else max(denominator, 1))
            position += 1
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_splitting_a_rollout_into_samples_micro_batches_and_ranks_changes_no_loss(seed):
    g = torch.Generator().manual_seed(seed)
    values, mask = torch.randn(24, generator=g), (torch.rand(24, generator=g) < 0.6).int()
    total = mask.sum().float()
    whole = make_reducer([24], [mask], total.reshape(1), per_token=False)(values)
    cuts = [0, *sorted(torch.randint(0, 25, (4,), generator=g).tolist()), 24]
    pieces = [(values[a:b], mask[a:b]) for a, b in itertools.pairwise(cuts)]
    in_one_batch = make_reducer(
        [len(v) for v, _ in pieces], [m for _, m in pieces], total.repeat(len(pieces)), per_token=False
    )(torch.cat([v for v, _ in pieces]))
    spread = sum(make_reducer([len(v)], [m], total.reshape(1), per_token=False)(v) for v, m in pieces)
    torch.testing.assert_close(in_one_batch, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(spread, whole, atol=1e-6, rtol=1e-5)


def test_an_infinite_value_at_a_masked_token_does_not_reach_the_sum():
    values = torch.tensor([1.0, torch.inf, 3.0], requires_grad=True)
    out = make_reducer([3], [torch.tensor([1, 0, 1])], torch.tensor([2.0]), per_token=False)(values)
    assert out == 2.0
    assert torch.autograd.grad(out, values)[0].tolist() == [0.5, 0.0, 0.5]


def test_empty_micro_batch_reduces_to_a_zero_with_graph():
    x = torch.zeros(0, requires_grad=True)
    assert make_reducer([], [], torch.zeros(0), per_token=False)(x * 2) == 0
    assert make_reducer([0], [torch.zeros(0)], torch.zeros(1), per_token=False)(x * 2).requires_grad


def test_a_fully_masked_sample_counts_no_tokens():
    assert count_tokens(masks()) == 6
    assert count_tokens([]) == 0


def test_segment_sum_adds_consecutive_values_including_empty_segments():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    sums = segment_sum(values, [1, 0, 3])
    assert sums.tolist() == [1.0, 0.0, 9.0]
    assert torch.autograd.grad(sums @ torch.tensor([1.0, 5.0, 2.0]), values)[0].tolist() == [1.0, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="segments hold 3"):
        segment_sum(values, [1, 2])


def test_lengths_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="2 mask entries for 3"):
        make_reducer([3], [torch.ones(2)], torch.ones(1), per_token=False)
    with pytest.raises(ValueError, match="same samples"):
        make_reducer([3], [torch.ones(3)], torch.ones(2), per_token=False)
    with pytest.raises(ValueError, match="expected 10"):
        reducer()(torch.zeros(9))
