"""Every formula of the policy loss against a plain loop over tokens, values and gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from slime.algorithms import grpo
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.clip import clipped_surrogate
from slime.algorithms.kl import approx_kl, importance_ratio
from slime.algorithms.policy_loss import PolicyTokens, policy_loss
from slime.algorithms.reduce import count_tokens, make_reducer, segment_sum
from slime.algorithms.sft import sft_loss

LENGTHS = [3, 1, 4, 2]
MASKS = [[1, 1, 0], [1], [0, 1, 1, 1], [0, 0]]  # the last sample is fully masked
DENOMINATORS = [5, 1, 5, 0]  # samples 0 and 2 are one rollout


def masks() -> list[torch.Tensor]:
    return [torch.tensor(m, dtype=torch.int32) for m in MASKS]


def reducer(per_token: bool = False):
    return make_reducer(LENGTHS, masks(), torch.tensor(DENOMINATORS, dtype=torch.float32), per_token=per_token)


def make_tokens(seed: int = 0) -> PolicyTokens:
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    old = -torch.rand(n, generator=g) * 3
    return PolicyTokens(
        log_probs=(old + torch.randn(n, generator=g) * 0.5).requires_grad_(),
        advantages=torch.randn(n, generator=g),
        entropy=torch.rand(n, generator=g).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old + torch.randn(n, generator=g) * 0.1,
        ref_log_probs=old + torch.randn(n, generator=g) * 0.3,
    )


def loop_loss(t: PolicyTokens, s: AlgorithmArgs) -> dict[str, torch.Tensor]:
    """The loss, token by token, in fp64 and with scalars only."""
    names = ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff")
    total = {name: torch.zeros((), dtype=torch.float64) for name in names}
    position = 0
    for mask, denominator in zip(MASKS, DENOMINATORS, strict=True):
        for m in mask:
            w = m * (1.0 if s.calculate_per_token_loss else 1.0 / max(denominator, 1))
            new = t.log_probs[position].double()
            engine = t.rollout_log_probs[position].double()
            old = engine if s.use_rollout_logprobs else t.old_log_probs[position].double()
            a = t.advantages[position].double()
            ratio = torch.exp(new - old)
            low, high = 1 - s.eps_clip, 1 + (s.eps_clip if s.eps_clip_high is None else s.eps_clip_high)
            bounded = min(max(ratio, torch.tensor(low).double()), torch.tensor(high).double())
            pg = max(-ratio * a, -bounded * a)
            if s.eps_clip_c is not None and a < 0:
                pg = min(-s.eps_clip_c * a, pg)
            d = new - t.ref_log_probs[position].double()
            kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "low_var_kl": torch.exp(-d) - 1 + d}[
                s.kl_loss_type
            ]
            if s.use_unbiased_kl:
                kl = kl * ratio
            if s.kl_loss_type == "low_var_kl":
                kl = min(max(kl, torch.tensor(-10.0).double()), torch.tensor(10.0).double())
            h = t.entropy[position].double()
            total["pg_loss"] = total["pg_loss"] + w * pg
            total["entropy_loss"] = total["entropy_loss"] + w * h
            total["kl_loss"] = total["kl_loss"] + w * kl
            total["pg_clipfrac"] += w * float(-bounded * a > -ratio * a)
            total["ppo_kl"] = total["ppo_kl"] + w * (old - new)
            x = new if s.use_rollout_logprobs else old
            total["train_rollout_logprob_abs_diff"] = total["train_rollout_logprob_abs_diff"] + w * abs(x - engine)
            position += 1
    total["loss"] = total["pg_loss"] - s.entropy_coef * total["entropy_loss"]
    if s.use_kl_loss:
        total["loss"] = total["loss"] + s.kl_loss_coef * total["kl_loss"]
    else:
        del total["kl_loss"]
    return total


SETTINGS = {
    "plain": AlgorithmArgs(),
    "clip-high": AlgorithmArgs(eps_clip=0.1, eps_clip_high=0.28),
    "dual-clip": AlgorithmArgs(eps_clip=0.1, eps_clip_c=1.3),
    "entropy": AlgorithmArgs(entropy_coef=0.01),
    "k1": AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1"),
    "k2": AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"),
    "k3-unbiased": AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_unbiased_kl=True),
    "low-var": AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", entropy_coef=0.1),
    "rollout-logprobs": AlgorithmArgs(use_rollout_logprobs=True),
    "per-token": AlgorithmArgs(calculate_per_token_loss=True, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_policy_loss_metrics_and_gradients_equal_a_loop_over_tokens(name, seed):
    settings, tokens = SETTINGS[name], make_tokens(seed)
    out = policy_loss(tokens, settings, reducer(settings.calculate_per_token_loss))
    wanted = loop_loss(tokens, settings)
    assert set(out.metrics) == set(wanted)
    for metric, value in out.metrics.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, wanted[metric].detach().float(), atol=1e-5, rtol=1e-5, msg=metric)
    leaves = (tokens.log_probs, tokens.entropy)
    actual = torch.autograd.grad(out.loss, leaves, allow_unused=True, materialize_grads=True)
    reference = torch.autograd.grad(wanted["loss"], leaves, allow_unused=True, materialize_grads=True)
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_without_old_log_probs_the_ratio_is_exactly_one_and_the_gradient_is_reinforce():
    tokens = replace(make_tokens(), old_log_probs=None)
    out = policy_loss(tokens, AlgorithmArgs(), reducer(per_token=True))
    assert out.metrics["ppo_kl"] == 0
    assert out.metrics["pg_clipfrac"] == 0
    (grad,) = torch.autograd.grad(out.loss, tokens.log_probs)
    mask = torch.tensor([m for sample in MASKS for m in sample])
    torch.testing.assert_close(grad, -tokens.advantages * mask)


def test_metric_order_is_the_same_for_every_micro_batch():
    settings = AlgorithmArgs(use_kl_loss=True)
    orders = {tuple(policy_loss(make_tokens(seed), settings, reducer()).metrics) for seed in range(3)}
    assert orders == {
        ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "kl_loss")
    }


@pytest.mark.parametrize(
    ("settings", "missing", "flag"),
    [
        (AlgorithmArgs(use_kl_loss=True), "ref_log_probs", "--use-kl-loss"),
        (AlgorithmArgs(use_rollout_logprobs=True), "rollout_log_probs", "--use-rollout-logprobs"),
        (AlgorithmArgs(entropy_coef=0.1), "entropy", "--entropy-coef"),
    ],
)
def test_log_probs_that_a_flag_needs_and_the_batch_lacks_are_an_error_with_the_flag(settings, missing, flag):
    with pytest.raises(ValueError, match=flag):
        policy_loss(replace(make_tokens(), **{missing: None}), settings, reducer())


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
    credit = grpo.credit([0.5, -1.0, 2.0], [2, 0, 1])
    assert [a.tolist() for a in credit.advantages] == [[0.5, 0.5], [], [2.0]]
    assert [a.dtype for a in credit.returns] == [torch.float32] * 3
    with pytest.raises(ValueError, match="zip"):
        grpo.credit([1.0], [1, 2])


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
