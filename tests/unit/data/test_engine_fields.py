"""The cut vocabulary that engines report, and the reports that are refused."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.batch.ship import tensorize
from slime.config.groups import from_args
from slime.data.engine_fields import FieldFlags, sampled_tokens
from slime.data.sample import Sample
from slime.utils.errors import DataError

REWARDS = RewardArgs(rewards_normalization=False)
META = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-1.5, 7, None], [-2.5, 8, None]],
    "output_token_sampling_logprobs": [-0.5, -0.25],
    "output_token_sampling_mask": [[9, 7], [8]],
}


def sampled(index: int = 0) -> Sample:
    sample = Sample(index=index, group_index=0, tokens=[1, 2], reward=1.0)
    tokens, log_probs = sampled_tokens(META)
    sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info=META)
    return sample


def test_log_probs_are_those_of_the_cut_and_sets_go_along_past_observations():
    sample = sampled()
    assert sample.rollout_log_probs == [-0.5, -0.25]
    sample.append_response_tokens(tokens=[3], trainable=False)
    sample.append_response_tokens(tokens=[7, 8], log_probs=[0.0, 0.0], meta_info=META)
    assert sample.rollout_top_p_token_ids.tolist() == [9, 7, 8, 9, 7, 8]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3, 5, 6]
    whole = {key: value for key, value in META.items() if "sampling" not in key}
    assert sampled_tokens(whole) == ([7, 8], [-1.5, -2.5])


def test_the_columns_are_int32_tensors_and_an_untrained_sample_needs_no_sets():
    untrained = Sample(index=1, group_index=0, tokens=[1, 2, 3], response_length=1, loss_mask=[0], reward=0.0)
    columns = tensorize(compile_train_data([sampled(), untrained], rewards=REWARDS))
    ids, offsets = columns["rollout_top_p_token_ids"], columns["rollout_top_p_token_offsets"]
    assert [value.tolist() for value in ids] == [[9, 7, 8], []]
    assert [value.tolist() for value in offsets] == [[0, 2, 3], [0, 0]]
    assert {value.dtype for value in (*ids, *offsets)} == {torch.int32}


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([9, 7, 8], [0, 2, 2, 3], "4 offsets"),
        ([9, 7], [0, 2, 3], "2 ids"),
        ([9, 7, 8], [0, 3, 1], "1 and 3 ids|up to 1"),
        ([9, 7, 8, 8], [0, 5, 4], "decrease"),
        ([9, 7, 6], [0, 2, 3], "sample token 8 at response position 1 from 1 ids"),
        ([9, 7], [0, 2, 2], "sample token 8 at response position 1 from 0 ids"),
    ],
)
def test_sets_that_are_not_those_of_the_tokens_are_refused(ids, offsets, message):
    sample = sampled()
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = ids, offsets
    with pytest.raises(DataError, match=rf"sample 0 \(group 0\) .*({message})"):
        compile_train_data([sample], rewards=REWARDS)


def test_a_trained_sample_without_sets_beside_others_with_them_is_refused():
    other = Sample(index=1, group_index=0, tokens=[1, 2, 3], response_length=1, reward=0.0, rollout_log_probs=[0.0])
    with pytest.raises(DataError, match=r"sample 1 \(group 0\) has trained tokens but no rollout_top_p_token_offsets"):
        compile_train_data([sampled(), other], rewards=REWARDS)


@pytest.mark.parametrize("flags", [{"rollout_top_p": 0.9}, {"rollout_top_k": 20}])
def test_a_batch_that_does_not_say_what_a_cut_left_is_not_trained_on(flags):
    args = Namespace(**({"rollout_top_p": 1.0, "rollout_top_k": -1, "loss_type": "policy_loss"} | flags))
    with pytest.raises(DataError, match=r"no sample of the rollout says which ids"):
        from_args(FieldFlags, args).check_sampling_sets({"loss_masks": [torch.tensor([0]), torch.tensor([0, 1])]})
    from_args(FieldFlags, args).check_sampling_sets({"rollout_top_p_token_offsets": []})
    FieldFlags(**(vars(args) | {"loss_type": "sft_loss"})).check_sampling_sets({})
    FieldFlags().check_sampling_sets({})


def test_a_batch_without_a_trained_token_needs_no_sets():
    args = Namespace(rollout_top_p=0.9, rollout_top_k=-1, loss_type="policy_loss")
    given_up = Sample(index=1, group_index=0, tokens=[1, 2, 3], response_length=1, loss_mask=[0], reward=0.0)
    from_args(FieldFlags, args).check_sampling_sets(tensorize(compile_train_data([given_up], rewards=REWARDS)))
