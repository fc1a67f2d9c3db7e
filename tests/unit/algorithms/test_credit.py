"""Advantages and returns of every estimator against plain loops in fp64, discounting, whitening over ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import pytest
import torch

from slime.algorithms import ESTIMATORS, CreditData
from slime.algorithms import credit as formulae
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.credit import masked_whiten
from slime.algorithms.ppo import chunked_discounted_returns, chunked_gae, vanilla_gae
from tests.unit.algorithms.two_ranks import run_ranks
from tests.verification import verify

MASKS = [[1, 1, 0, 1], [1], [], [0, 1, 1, 0], [0, 0]]
LENGTHS = [len(mask) for mask in MASKS]


def ragged(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for n in LENGTHS]


def make_data() -> CreditData:
    return CreditData(
        rewards=[1.0, -0.5, 2.0, 0.25, 3.0],
        response_lengths=LENGTHS,
        loss_masks=[torch.tensor(mask, dtype=torch.int32) for mask in MASKS],
        log_probs=ragged(1),
        ref_log_probs=ragged(2),
        values=ragged(3),
    )


def kl_of(d: float, kind: str) -> float:
    value = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)
    return max(-10.0, min(10.0, value)) if kind == "low_var_kl" else value


def loop(data: CreditData, s: AlgorithmArgs) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns) with nothing but floats."""
    advantages, returns = [], []
    for i, mask in enumerate(MASKS):
        n, reward = len(mask), data.rewards[i]
        kl = [
            kl_of(float(data.log_probs[i][t]) - float(data.ref_log_probs[i][t]), s.kl_loss_type) if s.kl_coef else 0.0
            for t in range(n)
        ]
        match s.advantage_estimator:
            case "grpo" | "gspo" | "cispo":
                a = r = [reward] * n
            case "reinforce_plus_plus_baseline":
                a = r = [reward - s.kl_coef * kl[t] for t in range(n)]
            case "reinforce_plus_plus":
                last = max((t for t in range(n) if mask[t]), default=None)
                token = [-s.kl_coef * kl[t] * mask[t] + (reward if t == last else 0.0) for t in range(n)]
                a = r = [sum(s.gamma ** (u - t) * token[u] for u in range(t, n)) for t in range(n)]
            case _:
                v = [*data.values[i].double().tolist(), 0.0]
                token = [-s.kl_coef * kl[t] + (reward if t == n - 1 else 0.0) for t in range(n)]
                delta = [token[t] + s.gamma * v[t + 1] - v[t] for t in range(n)]
                a = [sum((s.gamma * s.lambd) ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)]
                r = [a[t] + v[t] for t in range(n)]
        advantages.append(list(a))
        returns.append(list(r))
    return advantages, returns


def assert_rows(actual: list[torch.Tensor], wanted: list[list[float]]) -> None:
    assert [row.dtype for row in actual] == [torch.float32] * len(wanted)
    assert [len(row) for row in actual] == [len(row) for row in wanted]
    for a, b in zip(actual, wanted, strict=True):
        wanted_row = torch.tensor(b, dtype=torch.float64)
        verify("advantages and returns, all estimators", "a loop in fp64", a, wanted_row, tolerance=1e-5, scale="mixed")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_and_returns_equal_a_loop_over_tokens(estimator, kind):
    data = make_data()
    for kl_coef, (gamma, lambd) in itertools.product((0.0, 0.3), ((1.0, 1.0), (0.9, 0.5), (0.0, 1.0), (1.0, 0.0))):
        s = AlgorithmArgs(advantage_estimator=estimator, kl_loss_type=kind, kl_coef=kl_coef, gamma=gamma, lambd=lambd)
        credit = formulae.estimate(data, formulae.reward_kl(data, s), s)
        advantages, returns = loop(data, s)
        assert_rows(credit.advantages, advantages)
        assert_rows(credit.returns, returns)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_rank_without_samples_gets_empty_credit(estimator):
    data = CreditData([], [], [], [], [], [])
    s = AlgorithmArgs(advantage_estimator=estimator, kl_coef=0.1)
    credit = formulae.estimate(data, formulae.reward_kl(data, s), s)
    assert credit.advantages == credit.returns == []


def test_a_fully_masked_sample_gets_zero_return_from_reinforce_plus_plus_instead_of_an_error():
    data, s = make_data(), AlgorithmArgs(advantage_estimator="reinforce_plus_plus", kl_coef=0.5)
    credit = formulae.estimate(data, formulae.reward_kl(data, s), s)
    assert credit.advantages[4].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("missing", "who"), [("ref_log_probs", "reference model"), ("log_probs", "old policy")])
def test_a_kl_coefficient_without_its_log_probs_is_an_error(missing, who):
    data = CreditData(**(vars(make_data()) | {missing: None}))
    with pytest.raises(ValueError, match=rf"--kl-coef 0\.1 .* {who}"):
        formulae.reward_kl(data, AlgorithmArgs(kl_coef=0.1))


def test_gae_over_trained_tokens_is_that_of_the_responses_without_the_others():
    data = make_data()
    settings = AlgorithmArgs(advantage_estimator="ppo", kl_coef=0.1, gamma=0.97, lambd=0.9)
    kl = formulae.reward_kl(data, settings)
    only = dataclasses.replace(settings, gae_trained_tokens_only=True)
    credit = formulae.estimate(data, kl, only)
    trained = [mask != 0 for mask in data.loss_masks]
    shorter = dataclasses.replace(
        data,
        response_lengths=[int(part.sum()) for part in trained],
        values=[row[part] for row, part in zip(data.values, trained, strict=True)],
    )
    alone = formulae.estimate(shorter, [row[part] for row, part in zip(kl, trained, strict=True)], settings)
    for i, part in enumerate(trained):
        torch.testing.assert_close(credit.advantages[i][part], alone.advantages[i])
        torch.testing.assert_close(credit.returns[i][part], alone.returns[i])
        assert not credit.advantages[i][~part].any()
        torch.testing.assert_close(credit.returns[i][~part], data.values[i][~part])  # a target that asks for nothing
    noisy = dataclasses.replace(
        data, values=[torch.where(part, row, 1e6) for row, part in zip(data.values, trained, strict=True)]
    )
    assert_rows(formulae.estimate(noisy, kl, only).advantages, [row.tolist() for row in credit.advantages])


def test_ppo_without_values_is_an_error():
    data = CreditData(**(vars(make_data()) | {"values": None}))
    with pytest.raises(ValueError, match="the critic has not been run"):
        formulae.estimate(data, data.log_probs, AlgorithmArgs(advantage_estimator="ppo"))


# ---------------------------------------------------------------------------------------------- distillation


def test_distillation_takes_the_reverse_kl_off_the_advantages_and_leaves_the_returns():
    data, s = make_data(), AlgorithmArgs()
    credit = formulae.estimate(data, formulae.reward_kl(data, s), s)
    student, teacher = ragged(7), ragged(8)
    distilled, divergence = formulae.distilled(credit, student, teacher, 0.5)
    for i, n in enumerate(LENGTHS):
        wanted = [float(student[i][t]) - float(teacher[i][t]) for t in range(n)]
        torch.testing.assert_close(divergence[i], torch.tensor(wanted), atol=1e-6, rtol=1e-5)
        expected = torch.tensor([data.rewards[i] - 0.5 * d for d in wanted])
        torch.testing.assert_close(distilled.advantages[i], expected, atol=1e-6, rtol=1e-5)
    assert distilled.returns is credit.returns


def test_distilling_from_oneself_changes_nothing():
    data, s = make_data(), AlgorithmArgs()
    credit = formulae.estimate(data, formulae.reward_kl(data, s), s)
    distilled, _ = formulae.distilled(credit, ragged(7), ragged(7), 3.0)
    for a, b in zip(distilled.advantages, credit.advantages, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------- discounting


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 640])
def test_chunked_discounted_returns_equal_the_recurrence(length, discount):
    g = torch.Generator().manual_seed(length)
    rewards = torch.randn(3, length, generator=g)
    wanted, following = torch.zeros(3, length, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        following = rewards[:, t].double() + discount * following
        wanted[:, t] = following
    for chunk in (1, 7, 128):
        actual = chunked_discounted_returns(rewards, discount, chunk)
        assert actual.dtype == rewards.dtype
        verify("discounted returns in chunks", "the recurrence in fp64", actual, wanted, tolerance=1e-4)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.0, 1.0), (1.0, 0.0)])
def test_chunked_gae_equals_the_token_by_token_form(gamma, lambd):
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 300, generator=g), torch.randn(2, 300, generator=g)
    for a, b in zip(
        vanilla_gae(rewards, values, gamma, lambd), chunked_gae(rewards, values, gamma, lambd), strict=True
    ):
        verify("GAE in chunks", "GAE token by token", a, b, tolerance=1e-4)


def test_rows_without_tokens_and_batches_without_rows_have_empty_returns():
    for shape in ((0, 5), (3, 0)):
        assert chunked_discounted_returns(torch.zeros(shape), 0.9).shape == shape
        assert chunked_gae(torch.zeros(shape), torch.zeros(shape), 1.0, 1.0)[0].shape == shape
        assert vanilla_gae(torch.zeros(shape), torch.zeros(shape), 1.0, 1.0)[1].shape == shape


def test_shapes_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        chunked_discounted_returns(torch.zeros(3), 0.9)
    with pytest.raises(ValueError, match="rewards and values"):
        chunked_gae(torch.zeros(2, 3), torch.zeros(2, 4), 1.0, 1.0)


# ---------------------------------------------------------------------------------------------- whitening


def test_whitening_gives_mean_zero_and_unbiased_variance_one_over_trained_tokens_only():
    g = torch.Generator().manual_seed(0)
    values, mask = torch.randn(50, generator=g) * 3 + 7, torch.rand(50, generator=g) < 0.6
    out = masked_whiten(values, mask.int())
    trained = out[mask].double().tolist()
    assert statistics.fmean(trained) == pytest.approx(0, abs=1e-6)
    assert statistics.variance(trained) == pytest.approx(1, abs=1e-6)
    kept = values[mask].double().tolist()
    mean, deviation = statistics.fmean(kept), statistics.stdev(kept)
    torch.testing.assert_close(out, ((values.double() - mean) / deviation).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masked_whiten(values, mask, shift_mean=False), out + mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [1.7, -0.7, 0.0, 1e6])
def test_constant_advantages_become_zero_and_not_nan(value):
    assert masked_whiten(torch.full((1000,), value), torch.ones(1000)).abs().max() <= 1e-4
    assert masked_whiten(torch.tensor([value]), torch.ones(1)).item() == 0.0


def test_a_masked_token_may_hold_anything():
    out = masked_whiten(torch.tensor([1.0, 3.0, torch.inf]), torch.tensor([1, 1, 0]))
    torch.testing.assert_close(out[:2], torch.tensor([-1.0, 1.0]) / math.sqrt(2))


def test_whitening_nothing_is_an_error_for_the_helper_and_leaves_advantages_alone():
    with pytest.raises(ValueError, match="every sample on every rank"):
        masked_whiten(torch.ones(3), torch.zeros(3))
    kept = formulae.normalize([torch.tensor([1.0, 2.0])], [torch.zeros(2)], None)
    assert [row.tolist() for row in kept] == [[1.0, 2.0]]
    assert formulae.normalize([], [], None) == []


def test_normalised_advantages_over_gloo_ranks_equal_one_process_even_where_a_rank_is_empty(tmp_path):
    rows, masks = ragged(4), [torch.tensor(mask) for mask in MASKS]
    whole = formulae.normalize(rows, masks, None)
    for name, shares in {"both": [[0, 1], [2, 3, 4]], "empty": [[0, 1, 2, 3, 4], []]}.items():
        inputs = [([rows[i] for i in share], [masks[i] for i in share]) for share in shares]
        got = run_ranks("whiten", tmp_path / name, inputs)
        for share, out in zip(shares, got, strict=True):
            assert len(out) == len(share)
            for i, row in zip(share, out, strict=True):
                torch.testing.assert_close(row, whole[i], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_tokens_that_the_engine_did_not_sample_have_no_kl_under_its_log_probs(kind):
    settings = AlgorithmArgs(advantage_estimator="ppo", kl_coef=0.1, kl_loss_type=kind, use_rollout_logprobs=True)
    data = CreditData(
        rewards=[1.0],
        response_lengths=[4],
        loss_masks=[torch.tensor([1, 0, 0, 1])],
        log_probs=[torch.tensor([-1.0, 0.0, 0.0, -2.0])],  # 0 stands for none: append_response_tokens
        ref_log_probs=[torch.tensor([-1.0, -9.0, -11.0, -2.0])],
        values=[torch.zeros(4)],
    )
    kl = formulae.reward_kl(data, settings)
    assert kl[0].tolist() == [0.0] * 4
    assert formulae.estimate(data, kl, settings).advantages[0].tolist() == [1.0] * 4
