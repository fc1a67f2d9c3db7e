from __future__ import annotations

import base64
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from slime.data.engine_meta import decode_int32_meta_array
from slime.data.sample import Sample, iter_samples


def finished(reason="stop", **more):
    return {"finish_reason": {"type": reason}, "prompt_tokens": 4, "cached_tokens": 2, "weight_version": "1", **more}


def test_the_dictionary_form_keeps_everything_even_what_plugins_attached():
    sample = Sample(index=3, tokens=[1, 2], status=Sample.Status.TRUNCATED, metadata={"a": 1})
    sample.payload_text = "plugin"
    sample.spec_info.spec_verify_ct = 4
    data = sample.to_dict()
    again = Sample.from_dict(data)
    assert data["status"] == "truncated"
    assert again.to_dict() == data
    assert again.payload_text == "plugin"
    assert isinstance(again.spec_info, Sample.SpecInfo)


def test_reading_a_dictionary_leaves_it_alone_and_refuses_a_bad_status():
    data = Sample().to_dict()
    before = dict(data)
    Sample.from_dict(data)
    assert data == before
    with pytest.raises(KeyError):
        Sample.from_dict({})
    with pytest.raises(ValueError, match="done"):
        Sample.from_dict({"status": "done"})


def test_counters_that_are_null_or_have_the_names_of_older_engines_are_read():
    sample = Sample.from_dict({"status": "pending", "spec_info": None, "prefix_cache_info": None})
    sample.spec_info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 4})
    sample.spec_info.add({"spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 4})
    assert (sample.spec_info.spec_accept_token_num, sample.spec_info.spec_draft_token_num) == (4, 8)


def test_samples_are_equal_only_to_themselves_and_can_be_put_in_sets():
    sample = Sample(teacher_log_probs=torch.zeros(3))
    twin = pickle.loads(pickle.dumps(sample))
    assert sample == sample
    assert sample != twin
    assert len({sample, twin}) == 2
    assert twin.status is Sample.Status.PENDING


def test_truncated_is_a_view_of_the_status():
    sample = Sample()
    sample.truncated = False
    assert sample.status is Sample.Status.COMPLETED
    sample.truncated = True
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.truncated
    assert "truncated" not in sample.to_dict()


def test_iter_samples_flattens_any_nesting_in_order():
    samples = [Sample(index=i) for i in range(4)]
    nested = [[samples[0], [samples[1], samples[2]]], samples[3]]
    assert [s.index for s in iter_samples(nested)] == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="int"):
        list(iter_samples([samples[0], 3]))


def test_importing_sample_needs_no_torch():
    code = "import slime.data.sample, slime.utils.types, sys; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engine_tokens_are_appended_with_mask_log_probs_counters_and_status():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.25], text="ab", meta_info=finished())
    sample.append_response_tokens(tokens=torch.tensor([5]), trainable=False, text="tool")
    sample.append_response_tokens(tokens=[6], log_probs=torch.tensor([-1.0]), meta_info=finished("length"))
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.response == "abtool"
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.weight_versions == ["1", "1"]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("something new", "pending")],
)
def test_the_finish_reason_decides_the_status(reason, status):
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=finished(reason))
    assert sample.status.value == status


def test_the_mask_list_grows_in_place_for_callers_that_keep_an_alias():
    sample = Sample(loss_mask=[])
    alias = sample.loss_mask
    sample.append_response_tokens(tokens=[1, 2], trainable=False)
    assert alias == [0, 0]
    assert alias is sample.loss_mask


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": [1, 2], "log_probs": [0.1]}, "1 log probabilities for 2 tokens"),
        ({"tokens": [1]}, "trainable response tokens require rollout log probabilities"),
        ({"tokens": [1], "log_probs": [-0.1], "trainable": False}, "should not pass rollout log probabilities"),
    ],
)
def test_log_probs_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**call)


def test_zero_log_probs_of_observations_are_accepted():
    sample = Sample()
    sample.append_response_tokens(tokens=[1, 2], log_probs=[0.0, 0.0], trainable=False)
    assert sample.rollout_log_probs == [0.0, 0.0]


def test_missing_log_probs_of_earlier_trainable_tokens_cannot_be_made_up():
    sample = Sample(tokens=[1, 2], response_length=1)
    with pytest.raises(ValueError, match="cannot be aligned"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0])


def test_a_chunk_of_an_unfinished_request_changes_no_counter_and_no_status():
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=finished(), update_terminal_info=False)
    assert sample.status is Sample.Status.PENDING
    assert sample.weight_versions == []


def test_top_p_blocks_are_merged_and_observations_get_empty_spans():
    sample = Sample()
    sample.append_response_tokens(tokens=[9], trainable=False)  # before the first nucleus
    nucleus = {"top_p_token_ids": [4, 5, 6], "top_p_token_offsets": [0, 1, 3]}
    sample.append_response_tokens(tokens=[4, 5], log_probs=[0.0, 0.0], meta_info=nucleus)
    sample.append_response_tokens(tokens=[9], trainable=False)
    nucleus = {"top_p_kept_token_ids": [7, 8], "top_p_kept_token_offsets": [0, 2]}
    sample.append_response_tokens(tokens=[7], log_probs=[0.0], meta_info=nucleus)
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 0, 1, 3, 3, 5]
    assert sample.rollout_top_p_token_ids.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "meta",
    [
        {"top_p_token_ids": [1]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [1, 1]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [0, 2]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [0, 1, 1]},
    ],
)
def test_top_p_arrays_that_do_not_fit_are_refused(meta):
    with pytest.raises(ValueError, match="top-p"):
        Sample().append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=meta)


def test_routed_experts_get_their_shape_and_continue_where_they_ended():
    class Args:
        num_layers, moe_router_topk = 2, 1

    def meta(*values, start=0):
        packed = base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()
        return {"routed_experts": packed, "routed_experts_start_len": start}

    sample = Sample(tokens=[1])
    sample.append_response_tokens(Args, tokens=[2, 3], log_probs=[0.0, 0.0], meta_info=meta(1, 2, 3, 4))
    assert sample.rollout_routed_experts.tolist() == [[[1], [2]], [[3], [4]]]
    sample.append_response_tokens(Args, tokens=[4], log_probs=[0.0], meta_info=meta(7, 8, 9, 10, start=1))
    assert sample.rollout_routed_experts.tolist() == [[[1], [2]], [[7], [8]], [[9], [10]]]
    with pytest.raises(ValueError, match="routed_experts element count"):
        sample.append_response_tokens(Args, tokens=[5], log_probs=[0.0], meta_info=meta(1, 2))


def test_int32_arrays_are_read_from_every_form_and_the_first_present_key_wins():
    values = np.array([1, 2, 70000], dtype="<i4")
    forms = [base64.b64encode(values.tobytes()).decode(), values.tobytes(), values, torch.tensor(values), [1, 2, 70000]]
    for form in forms:
        decoded = decode_int32_meta_array({"a": form}, "a")
        assert decoded.dtype == torch.int32
        assert decoded.tolist() == [1, 2, 70000]
    assert decode_int32_meta_array({"a": None, "b": [1]}, ("a", "b")) is None
    assert decode_int32_meta_array({}, "a") is None
