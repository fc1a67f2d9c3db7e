"""The place of a turn in the tree of messages, and the samples that the turns of a session are joined into."""

from __future__ import annotations

import base64
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.agent.trajectory import MessageNode, TrajectoryManager, TurnRecord, _common_prefix_len
from slime.data.sample import Sample

BASE = Sample(index=3, group_index=1, prompt="question", label="4")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, **extra) -> dict:
    return {"role": "assistant", "content": text} | extra


def turn(prompt: list[int], output: list[int], finish: str = "stop", **values) -> TurnRecord:
    return TurnRecord(prompt, output, finish, [-float(token) for token in output], **values)


class Session:
    """Turns of one session, each ``(messages, reply, prompt ids, output ids)``."""

    def __init__(self, **settings) -> None:
        self.manager = TrajectoryManager(**settings)

    def play(self, messages, reply, prompt, output, **values) -> Session:
        self.manager.record_turn(
            "s", turn=turn(prompt, output, **values), prompt_messages=messages, response_message=reply
        )
        return self

    def samples(self, **values) -> list[Sample]:
        return self.manager.get_trajectory("s", base_sample=BASE, **values)


def rows(samples: list[Sample]) -> list[tuple[list[int], list[int]]]:
    """(tokens, loss mask) of each, after a check that everything is aligned."""
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        for token, mask, log_prob in zip(response, sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert not mask or log_prob == -token
    return [(sample.tokens, sample.loss_mask) for sample in samples]


Q, A, OBS, A2 = user("q"), said("a"), {"role": "tool", "content": "t"}, said("b")


def test_turns_that_continue_each_other_are_one_sample_with_the_tools_masked():
    session = Session().play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 4, 5], [6])
    (sample,) = samples = session.samples(reward=0.5, extra_metadata={"k": 1})
    assert rows(samples) == [([1, 2, 3, 4, 5, 6], [1, 1, 0, 1])]
    assert (sample.reward, sample.status) == (0.5, Sample.Status.COMPLETED)
    assert (sample.index, sample.group_index, sample.rollout_id, sample.label) == (3, 1, 3, "4")
    assert sample.metadata == {"k": 1, "truncated": False, "use_tool": False, "ill_formed": False}
    assert not session.manager.has_session("s")
    assert session.samples() == []


def test_two_system_prompts_are_two_samples_with_the_whole_reward_each():
    session = Session()
    for number in (1, 2):
        session.play([{"role": "system", "content": str(number)}, Q], A, [number, 9], [7])
    samples = session.samples(reward=1.0)
    assert rows(samples) == [([1, 9, 7], [1]), ([2, 9, 7], [1])]
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert {sample.rollout_id for sample in samples} == {3}, "one execution, however many rows"


def test_a_reward_is_divided_where_the_manager_says_so():
    session = Session(reward_split="equal")
    for number in (1, 2):
        session.play([user(str(number))], A, [number], [7])
    assert [sample.reward for sample in session.samples(reward={"score": 1.0})] == [{"score": 0.5}] * 2
    with pytest.raises(ValueError, match="reward_split"):
        TrajectoryManager(reward_split="half")


def test_a_shared_reply_is_trained_once():
    session = Session().play([Q], A, [1], [2])
    for number in (5, 6):
        session.play([Q, A, {"role": "tool", "content": str(number)}], A2, [1, 2, number], [8])
    assert rows(session.samples()) == [([1, 2, 5, 8], [1, 0, 1]), ([1, 2, 6, 8], [0, 0, 1])]


def test_foreign_replies_in_the_prompt_are_context_only():
    session = Session().play([Q, said("not ours"), user("r")], A, [1, 2, 3], [4])
    assert rows(session.samples()) == [([1, 2, 3, 4], [1])]


def test_an_empty_response_makes_no_sample():
    assert Session().play([Q], said(""), [1], [], finish="length").samples() == []


def test_a_replay_that_drifts_inside_the_last_response_costs_its_training_and_nothing_else():
    # the response 3,4 comes back as 3,9: the sample continues from the tokens that the client sent
    session = Session().play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 9, 5], [6])
    assert rows(session.samples()) == [([1, 2, 3, 9, 5, 6], [0, 0, 0, 1])]


def test_a_replay_that_drifts_before_the_last_response_is_a_sample_of_its_own():
    session = Session().play([Q], A, [1, 2], [3]).play([Q, A, OBS], A2, [1, 8, 3, 5], [6])
    assert rows(session.samples()) == [([1, 2, 3], [1]), ([1, 8, 3, 5, 6], [1])]


@pytest.mark.parametrize(("num_output", "num_samples"), [(2, 1), (3, 2), (4, 2)])
def test_a_long_output_forks_rather_than_cost_the_response_before_it(num_output, num_samples):
    session = Session(fork_threshold_tokens=3).play([Q], A, [1, 2], [3, 4])
    session.play([Q, A, OBS], A2, [1, 2, 3, 9], list(range(10, 10 + num_output)))
    assert len(session.samples()) == num_samples


def test_threshold_zero_forks_always():
    session = Session(fork_threshold_tokens=0).play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 9], [6])
    assert rows(session.samples()) == [([1, 2, 3, 4], [1, 1]), ([1, 2, 3, 9, 6], [1])]


def test_a_reply_that_comes_back_rewritten_is_given_up_for_one_sample():
    session = Session().play([Q], A, [1], [2, 3]).play([Q, said("rewritten"), OBS], A2, [1, 7, 5], [6])
    (leaf,) = session.manager._sessions["s"].root.leaves()
    rewritten = leaf.path_from_root()[1]
    assert rewritten.metadata["merged_rewrite"] == {"abandoned_turn_index": 1, "abandoned_response_tokens": 2}
    assert (rewritten.turn, leaf.turn_index, session.manager.turn_count("s")) == (None, 2, 2)
    assert rows(session.samples()) == [([1, 7, 5, 6], [1])]


@pytest.mark.parametrize(
    ("settings", "output"), [({"fork_threshold_tokens": 2}, [2, 3]), ({"fork_threshold_tokens": 0}, [2])]
)
def test_a_long_reply_that_comes_back_rewritten_keeps_its_own_sample(settings, output):
    session = Session(**settings).play([Q], A, [1], output).play([Q, said("rewritten")], A2, [1, 7], [6])
    assert len(session.samples()) == 2


def test_of_two_replies_none_is_merged_with_a_third(caplog):
    session = Session().play([Q], A, [1], [2]).play([Q], said("c"), [1], [3])
    session.play([Q, said("rewritten")], A2, [1, 7], [6])
    assert "may be" in caplog.text
    assert len(session.samples()) == 3


@pytest.mark.parametrize(
    "replayed",
    [
        {"content": "a", "role": "assistant"},
        said(" a\n"),
        said("a", tool_calls=[], reasoning_content=None),
        said("a", reasoning_content="thoughts that were not recorded"),
    ],
)
def test_what_clients_change_for_no_reason_does_not_fork(replayed):
    session = Session(fork_threshold_tokens=0).play([Q], A, [1], [2]).play([Q, replayed, OBS], A2, [1, 2, 5], [6])
    assert rows(session.samples()) == [([1, 2, 5, 6], [1, 0, 1])]


def test_the_status_says_that_the_last_turn_was_cut_off():
    session = Session().play([Q], A, [1], [2]).play([Q, A, OBS], A2, [1, 2, 5], [6], finish="length")
    (sample,) = session.samples()
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.metadata["truncated"]


def test_tools_and_broken_tool_calls_are_noted():
    call = said("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])
    (sample,) = Session().play([Q], call, [1], [2], ill_formed=True).samples()
    assert sample.metadata["use_tool"]
    assert sample.metadata["ill_formed"]


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (9, [([1, 2, 3, 4, 5, 6], [1, 1, 0, 1])]),
        (5, [([1, 2, 3, 4, 5], [1, 1, 0])]),
        (3, [([1, 2, 3], [1])]),
        (2, []),  # nothing of the response is left
        (1, []),
    ],
)
def test_a_sample_is_cut_at_the_cap_and_dropped_where_nothing_is_left(cap, expected):
    session = Session().play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 4, 5], [6])
    samples = session.samples(max_sample_tokens=cap)
    assert rows(samples) == expected
    assert all((sample.status is Sample.Status.TRUNCATED) == (cap < 6) for sample in samples)


def meta(version: str, nuclei: list[list[int]] | None = None, experts: list[int] | None = None) -> dict:
    found: dict = {"finish_reason": {"type": "stop"}, "weight_version": version}
    found |= {"prompt_tokens": 4, "cached_tokens": 1}
    if nuclei is not None:
        offsets = [0]
        for ids in nuclei:
            offsets.append(offsets[-1] + len(ids))
        found |= {"top_p_token_ids": [i for ids in nuclei for i in ids], "top_p_token_offsets": offsets}
    if experts is not None:
        found["routed_experts"] = experts
    return found


def test_versions_nuclei_experts_and_cache_of_the_engine_reach_the_sample():
    args = SimpleNamespace(num_layers=1, moe_router_topk=1)
    session = Session(args=args)
    session.play([Q], A, [1, 2], [3, 4], meta_info=meta("1", [[3], [4, 5]], [0, 1, 2]))
    session.play([Q, A, OBS], A2, [1, 2, 3, 4, 5], [6], meta_info=meta("2", [[6]], [0, 1, 2, 3, 4]))
    (sample,) = session.samples()
    assert sample.weight_versions == ["1", "2"]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.25
    assert sample.rollout_top_p_token_ids.tolist() == [3, 4, 5, 6]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 3, 4], "the tool's token has no nucleus"
    assert sample.rollout_routed_experts.flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_cut_keeps_nuclei_and_experts_aligned():
    args = SimpleNamespace(num_layers=1, moe_router_topk=1)
    session = Session(args=args).play([Q], A, [1], [2, 3], meta_info=meta("1", [[2, 9], [3]], [0, 1]))
    (sample,) = session.samples(max_sample_tokens=2)
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2]
    assert sample.rollout_top_p_token_ids.tolist() == [2, 9]
    assert torch.equal(sample.rollout_routed_experts, torch.zeros(1, 1, 1, dtype=torch.uint8))


def test_a_turn_without_log_probs_has_zeros_and_one_with_a_wrong_number_is_refused():
    manager = TrajectoryManager()
    bare = replace(turn([1], [2]), output_log_probs=[])
    manager.record_turn("s", turn=bare, prompt_messages=[Q], response_message=A)
    assert manager.get_trajectory("s", base_sample=BASE)[0].rollout_log_probs == [0.0]
    with pytest.raises(AssertionError, match="output_log_probs"):
        manager.record_turn(
            "s", turn=replace(bare, output_log_probs=[0.0, 0.0]), prompt_messages=[Q], response_message=A
        )


def test_a_turn_without_messages_and_an_unknown_session_are_nothing(caplog):
    manager = TrajectoryManager()
    manager.record_turn("s", turn=turn([1], [2]), prompt_messages=[], response_message=A)
    assert not manager.has_session("s")
    assert "without messages" in caplog.text
    assert manager.get_trajectory("t", base_sample=BASE) == []
    with pytest.raises(TypeError):
        manager.get_trajectory("t")


def test_unfinished_sessions_are_forgotten():
    session = Session().play([Q], A, [1], [2])
    assert session.manager.drop_idle(60.0) == []
    assert session.manager.drop_idle(-1.0) == ["s"]
    assert (session.manager.has_session("s"), session.manager.turn_count("s")) == (False, 0)


def test_leaves_come_depth_first_and_paths_leave_the_root_out():
    root = MessageNode()
    left, right = root.add_child(MessageNode(role="user")), root.add_child(MessageNode(role="user"))
    deep = left.add_child(MessageNode(role="assistant"))
    assert root.leaves() == [deep, right]
    assert deep.path_from_root() == [left, deep]
    assert root.is_root
    assert not deep.is_root


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize(("a", "b"), [([], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 2, 9]), ([1], [2])])
def test_the_common_prefix_is_found_whatever_the_chunk(a, b, chunk):
    plain = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert _common_prefix_len(a, b, chunk) == plain


def test_a_sample_says_how_many_tokens_lost_their_training_to_what_the_client_sent_back():
    kept = Session().play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 4, 5], [6])
    (sample,) = kept.samples()
    assert "abandoned_response_tokens" not in sample.metadata
    realigned = Session().play([Q], A, [1, 2], [3, 4]).play([Q, A, OBS], A2, [1, 2, 3, 9, 5], [6])
    (sample,) = samples = realigned.samples()
    assert rows(samples) == [([1, 2, 3, 9, 5, 6], [0, 0, 0, 1])]
    assert sample.metadata["abandoned_response_tokens"] == 2
    rewritten = Session().play([Q], A, [1, 2], [3, 4]).play([Q, said("other"), OBS], A2, [1, 2, 7, 5], [6])
    rewritten.play([Q, said("other"), OBS, A2, user("r")], said("c"), [1, 2, 7, 5, 6, 8], [9])
    rewritten.play([Q, said("other"), OBS, A2, user("else")], said("d"), [1, 2, 7, 5, 6, 10], [11])
    first, second = rewritten.samples()
    assert first.metadata["abandoned_response_tokens"] == 2
    assert "abandoned_response_tokens" not in second.metadata


def test_the_last_sample_has_the_last_turn():
    manager, task, two = TrajectoryManager(), user("task"), said("2")
    manager.record_turn("s", turn=turn([1], [2]), prompt_messages=[task], response_message=two)
    manager.record_turn("s", turn=turn([7], [8]), prompt_messages=[user("helper")], response_message=said("8"))
    last = {"prompt_messages": [task, two, user("3")], "response_message": said("4")}
    manager.record_turn("s", turn=turn([1, 2, 3], [4]), **last)
    samples = manager.get_trajectory("s", base_sample=Sample(index=0))
    assert [sample.tokens for sample in samples] == [[7, 8], [1, 2, 3, 4]]


def test_a_turn_without_room_for_a_request_leaves_the_experts_of_the_turns_before_it():
    manager, q, a = TrajectoryManager(args=Namespace(num_layers=1, moe_router_topk=1)), user("q"), said("a")
    experts = base64.b64encode(np.zeros((2, 1, 1), dtype="<i4").tobytes()).decode()
    meta = {"finish_reason": {"type": "stop"}, "routed_experts": experts}
    manager.record_turn("s", turn=turn([1], [2, 3], meta_info=meta), prompt_messages=[q], response_message=a)
    full = turn([1, 2, 3, 4, 5], [], "length")  # as call_sglang_generate gives it
    manager.record_turn("s", turn=full, prompt_messages=[q, a, q], response_message=said(""))
    (sample,) = manager.get_trajectory("s", base_sample=Sample(index=0))
    assert sample.loss_mask == [1, 1, 0, 0]
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.rollout_routed_experts.shape == (2, 1, 1)
