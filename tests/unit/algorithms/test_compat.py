"""The names, argument orders and shapes that users' code imports from ``slime.utils.ppo_utils``."""

from __future__ import annotations

import inspect
from argparse import Namespace

import pytest
import torch

from slime.hooks import check_hooks
from slime.utils import ppo_utils

SIGNATURES = {
    "calculate_log_probs_and_entropy": "logits tokens tp_group with_entropy chunk_size log_prob_keep_mask "
    "with_entropy_grad",
    "chunked_discounted_returns": "rewards discount chunk_size",
    "chunked_gae": "rewards values gamma lambd chunk_size",
    "compute_approx_kl": "log_probs log_probs_base kl_loss_type importance_ratio",
    "compute_cispo_loss": "ppo_kl log_probs advantages eps_clip eps_clip_high",
    "compute_gspo_kl": "full_log_probs full_old_log_probs local_log_probs loss_masks",
    "compute_opsm_mask": "args full_log_probs full_old_log_probs advantages loss_masks",
    "compute_policy_loss": "ppo_kl advantages eps_clip eps_clip_high eps_clip_c",
    "get_advantages_and_returns_batch": "total_lengths response_lengths values_list rewards_list gamma lambd chunked",
    "get_grpo_returns": "rewards kl",
    "get_reinforce_plus_plus_baseline_advantages": "rewards kl loss_masks kl_coef",
    "get_reinforce_plus_plus_returns": "rewards kl loss_masks response_lengths total_lengths kl_coef gamma",
    "vanilla_gae": "rewards values gamma lambd",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_formulae_keep_their_argument_names(name):
    assert list(inspect.signature(getattr(ppo_utils, name)).parameters) == SIGNATURES[name].split()


def test_every_public_formula_is_in_the_list():
    assert sorted(ppo_utils.__all__) == sorted(SIGNATURES)


def test_log_probs_have_a_column_and_no_rows_give_flat_empty_results():
    logits, tokens = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 7])
    log_probs, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    dense = logits.log_softmax(-1)
    torch.testing.assert_close(log_probs, dense.gather(1, tokens[:, None]))
    torch.testing.assert_close(entropy, -(dense.exp() * dense).sum(-1))
    empty = ppo_utils.calculate_log_probs_and_entropy(logits[:0], tokens[:0], None, with_entropy=True)
    assert [x.shape for x in empty] == [(0,), (0,)]
    only_target = torch.zeros(5, 8, dtype=torch.bool)
    kept, _ = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=only_target)
    assert torch.equal(kept, torch.zeros(5, 1))


def test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token():
    kl, masks = [torch.ones(3), torch.ones(2)], [torch.tensor([1, 1, 0]), torch.tensor([1, 1])]
    returns = ppo_utils.get_reinforce_plus_plus_returns(torch.tensor([1.0, 2.0]), kl, masks, [3, 2], [9, 9], 0.1, 0.5)
    torch.testing.assert_close(returns[0], torch.tensor([-0.1 + 0.5 * 0.9, 0.9, 0.0]))
    torch.testing.assert_close(returns[1], torch.tensor([-0.1 + 0.5 * 1.9, 1.9]))
    assert ppo_utils.get_reinforce_plus_plus_returns(torch.zeros(0), [], [], [], [], 0.1, 0.5) == []
    centred = ppo_utils.get_reinforce_plus_plus_baseline_advantages(torch.tensor([1.0, 2.0]), kl, masks, 0.1)
    assert [row.tolist() for row in centred] == [pytest.approx([0.9] * 3), pytest.approx([1.9] * 2)]
    assert [row.tolist() for row in ppo_utils.get_grpo_returns(torch.tensor([1.0, 2.0]), kl)] == [[1.0] * 3, [2.0] * 2]


def test_sequence_ratios_and_dropped_sequences_from_lists():
    new, old = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])], [torch.tensor([-1.0, -1.0]), torch.tensor([-3.0])]
    masks = [torch.tensor([1, 1]), torch.tensor([1])]
    kl = ppo_utils.compute_gspo_kl(new, old, new, masks)
    assert kl.tolist() == [0.5, 0.5, -2.0]
    advantages = [torch.tensor([-1.0, 1.0]), torch.tensor([-1.0])]
    mask, fraction = ppo_utils.compute_opsm_mask(Namespace(opsm_delta=0.1), new, old, advantages, masks)
    assert mask.tolist() == [0.0, 1.0, 1.0]
    assert fraction == 0.5


@pytest.mark.parametrize("chunked", [True, False])
def test_gae_of_ragged_rows_equals_the_rows_alone(chunked):
    g = torch.Generator().manual_seed(0)
    lengths = [3, 1, 130]
    values, rewards = ([torch.randn(n, generator=g) for n in lengths] for _ in range(2))
    advantages, returns = ppo_utils.get_advantages_and_returns_batch(
        lengths, lengths, values, rewards, 0.9, 0.8, chunked
    )
    for i in range(3):
        alone = ppo_utils.vanilla_gae(rewards[i][None], values[i][None], 0.9, 0.8)
        torch.testing.assert_close(advantages[i], alone[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(returns[i], alone[1][0], atol=1e-5, rtol=1e-5)
    assert ppo_utils.get_advantages_and_returns_batch([], [], [], [], 1.0, 1.0) == ([], [])


@pytest.mark.parametrize(
    ("dest", "path"),
    [
        ("custom_tis_function_path", "slime.backends.megatron_utils.loss.icepop_function"),
        ("custom_tis_function_path", "slime.backends.megatron_utils.loss.vanilla_tis_function"),
        ("custom_loss_function_path", "slime.backends.megatron_utils.loss.policy_loss_function"),
        ("custom_advantage_function_path", "slime.backends.megatron_utils.loss.compute_advantages_and_returns"),
    ],
)
def test_the_builtin_functions_have_the_signatures_of_their_hooks(dest, path):
    assert check_hooks(Namespace(**{dest: path})) == []
    problems = check_hooks(Namespace(**{dest: "slime.algorithms.policy_loss.sequence_log_ratio"}))
    assert len(problems) == 1
    assert problems[0].startswith("--" + dest.replace("_", "-"))
