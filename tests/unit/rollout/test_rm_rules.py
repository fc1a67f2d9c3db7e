"""The rule graders, by example: accepted answers, refused answers, and odd labels, which do not end a run."""

from __future__ import annotations

import asyncio
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.rm_hub import async_rm, compute_gpqa_reward, compute_score_dapo, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.rules import (
    DEFAULT_VALID_LETTERS,
    _extract_letter_from_response,
    compute_ifbench_reward,
    is_correct_strict_box,
    last_boxed_only_string,
    normalize_final_answer,
    remove_boxed,
    verify,
)
from slime.utils.errors import ScoringError
from tests.limits import unloaded_time


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        *(("x = 42", "42"), ("42 square", "42"), ("a b c", "bc"), (r"\text{hello}", "hello"), ("1,234,567", "1234567")),
        *(
            ("42.", "42."),
            ("1,000.5", "1,000.5"),
            ("$42$", "42"),
            (r"\frac12", r"\frac{1}{2}"),
            (r"\sqrt3", r"\sqrt{3}"),
        ),
    ],
)
def test_dapo_normalises_an_answer_as_minerva_does(text: str, normal: str):
    assert normalize_final_answer(text) == normal


@pytest.mark.parametrize(
    ("response", "label", "score", "prediction"),
    [
        ("Answer: 42", "42", 1.0, "42"),
        ("Answer: $42$", "42", 1.0, "42"),
        ("first Answer: 7\nthen answer : 42", "42", 1.0, "42"),
        ("Answer: 42.0", "42", -1.0, "42.0"),
        ("**Answer:** 42", "42", -1.0, "**42"),
        ("Answer: 42 apples", "42", -1.0, "42apples"),
        ("Answer: 42", "42.7", -1.0, "42"),
        ("Answer: 42.7", "42.7", 1.0, "42.7"),
        ("Answer: 42", "42.0", 1.0, "42"),
        ("Answer: 12345678901234567890", "12345678901234567890", 1.0, "12345678901234567890"),
        ("Answer: 7", "inf", -1.0, "7"),
        ("Answer: 7", "7" * 5000, -1.0, "7"),
        ("no answer here", "42", -1.0, "[INVALID]"),
        ("Answer: 42" + " " * 400, "42", -1.0, "[INVALID]"),  # only the last 300 characters count
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
    ],
)
def test_dapo_scores_the_last_answer_line(response: str, label: str, score: float, prediction: str):
    assert compute_score_dapo(response, label) == {"score": score, "acc": score > 0, "pred": prediction}


def test_dapo_in_strict_mode_compares_the_last_box_character_by_character():
    assert is_correct_strict_box(r"so \boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}") == (1, r"\frac{1}{2}")
    assert is_correct_strict_box(r"\boxed{0.5}", r"\frac{1}{2}") == (-1, "0.5")
    assert is_correct_strict_box(r"\boxed{5}" + "." * 100, "5") == (-1, None)
    assert verify(r"\boxed{5}", "5", strict_box_verify=True) == (True, "5")


def test_boxes_are_found_by_their_braces_and_nothing_else_can_be_unboxed():
    assert last_boxed_only_string(r"\boxed{a{b}c} d") == r"\boxed{a{b}c}"
    assert last_boxed_only_string(r"\boxed{never closed") is None
    assert last_boxed_only_string(r"\fbox{5}") is None
    with pytest.raises(AssertionError, match="box error"):
        remove_boxed("5")


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"thinking \boxed{1}</think> so \boxed{42}", "42", 1),
        (r"thinking \boxed{42}</think> so I do not know", "42", 0),
        (r"###Response \boxed{\frac{1}{2}} ###Response x", "0.5", 1),
        (r"\boxed{42}", "42", 0),  # no thinking, no marker
        (r"</think> \boxed{42}", 42, 1),
        (r"</think> \boxed{42}", r"the answer is \boxed{42}", 1),
        (r"</think> \boxed{42}", r"\boxed", 0),
        (r"</think> \boxed{42}", "", 0),
    ],
)
def test_deepscaler_grades_the_box_behind_the_thinking(response: str, label: Any, reward: int):
    assert get_deepscaler_rule_based_reward(response, label) == reward


def test_deepscaler_refuses_labels_that_are_neither_text_nor_number():
    with pytest.raises(AssertionError, match="label is a NoneType"):
        get_deepscaler_rule_based_reward(r"</think> \boxed{1}", None)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is B", "B"),
        ("The correct answer is (B).", "B"),
        (r"Final answer: \boxed{C}", "C"),
        ("answer in brief: B", "B"),
        ("**D** is correct", "D"),
        ("<think>answer is A</think> I choose C", "C"),
        ("A or B? Finally B", "B"),
        ("nothing", None),
        ("", None),
    ],
)
def test_gpqa_finds_the_letter_a_response_commits_to(response: str, letter: str | None):
    assert _extract_letter_from_response(response, DEFAULT_VALID_LETTERS) == letter


CHOICES = {"choices": ["red", "green", "dark blue", "a"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is B", "B", {}, 1.0),
        ("The answer is B", "C", {}, 0.0),
        ("The answer is C", "Dark Blue!", CHOICES, 1.0),
        ("The answer is B", 1, CHOICES, 1.0),
        ("The answer is B", 0, CHOICES | {"correct_letter": "B"}, 0.0),
        ("The answer is Z", "B", {"correct_letter": "b", "valid_letters": ["x", "b"]}, 0.0),
        ("it must be dark blue", "C", CHOICES, 1.0),
        ("it must be darker blue", "C", CHOICES, 0.0),
        ("nothing that has an a as a word in it: bat", "dog", {}, 0.0),
        (None, "B", {}, 0.0),
    ],
)
def test_gpqa_scores_letters_first_and_the_text_of_the_choice_second(
    response: str | None, label: Any, metadata: dict[str, Any], reward: float
):
    assert compute_gpqa_reward(response, label, metadata) == reward


@pytest.mark.parametrize("filler", [" ", "(", "( *", "Answer: "])
def test_gpqa_reads_a_megabyte_of_nothing_in_no_time(filler: str):
    started = unloaded_time()
    assert _extract_letter_from_response(f"answer{filler * (10**6 // len(filler))}is (B)", DEFAULT_VALID_LETTERS) == "B"
    assert unloaded_time() - started < 5


def test_ifbench_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "evaluation_lib", None)
    with pytest.raises(ImportError, match="SLIME_IFBENCH_DIR"):
        compute_ifbench_reward("text", None, {"instruction_id_list": ["x"]})


def test_ifbench_hands_one_mapping_of_arguments_per_instruction_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "evaluation_lib.py").write_text(
        "from types import SimpleNamespace as InputExample\n"
        "def test_instruction_following_strict(example, responses):\n"
        "    good = example.kwargs == [{'n': 2}, {'n': 2}] and responses == {'p': 'text'} and example.key == 7\n"
        "    return InputExample(follow_all_instructions=good)\n"
    )
    monkeypatch.delitem(sys.modules, "evaluation_lib", raising=False)
    monkeypatch.setenv("SLIME_IFBENCH_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    facts = {
        "instruction_id_list": [" a ", "b", ""],
        "kwargs": [{"n": 2, "m": None}],
        "prompt_text": "p",
        "record_id": 7,
    }
    assert compute_ifbench_reward("text", None, facts) == 1.0
    assert compute_ifbench_reward("other", None, facts) == 0.0
    assert compute_ifbench_reward("text", None, None) == 0.0
    sys.modules.pop("evaluation_lib", None)


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("boxed_deepscaler", r"\boxed{42}", "42", 1),
        ("boxed_dapo", r"\boxed{42}", "42", {"score": 1.0, "acc": True, "pred": "42"}),
        ("boxed_gpqa", r"\boxed{B}", "B", 1.0),
        ("gpqa", "The answer is B", "B", 1.0),
        ("dapo", "Answer: 42", "42", {"score": 1.0, "acc": True, "pred": "42"}),
    ],
)
def test_rules_are_reached_by_name_and_by_their_boxed_name(rm_type: str, response: str, label: str, reward: Any):
    args = Namespace(rm_type=rm_type, custom_rm_path=None, rm_timeout=10.0)
    sample = Sample(response=response, label=label)
    assert asyncio.run(async_rm(args, sample)) == reward


LABELLED = ("math", "boxed_math", "math_verify", "deepscaler", "dapo", "f1", "gpqa")


@pytest.mark.parametrize("rm_type", LABELLED)
@pytest.mark.parametrize("label", [["42"], {"answer": "42"}, float("nan")])
def test_a_label_that_no_response_can_equal_is_named_and_not_scored_0(rm_type: str, label: Any):
    sample = Sample(index=3, response="Answer: \\boxed{42}", label=label)
    with pytest.raises(
        ScoringError, match=f"--rm-type {rm_type} on sample 3: its label is .*, a {type(label).__name__};"
    ):
        asyncio.run(async_rm(Namespace(rm_type=rm_type), sample))


@pytest.mark.parametrize("rm_type", LABELLED)
@pytest.mark.parametrize("text", ["None", "nan", "null"])
def test_a_sample_without_a_label_is_named_and_no_response_equals_it(rm_type: str, text: str):
    sample = Sample(index=3, response=f"{text}</think> Answer: {text} \\boxed{{{text}}}")
    with pytest.raises(ScoringError, match="on sample 3: its label is 'None', a NoneType"):
        asyncio.run(async_rm(Namespace(rm_type=rm_type), sample))


def test_gpqa_reads_an_answer_from_the_metadata_of_a_row_without_a_label():
    sample = Sample(response="The answer is B", metadata={"correct_letter": "B"})
    assert asyncio.run(async_rm(Namespace(rm_type="gpqa"), sample)) == 1.0


def test_a_label_may_be_an_integer_that_no_float_holds():
    sample = Sample(response=f"\\boxed{{{10**400}}}", label=10**400)
    assert asyncio.run(async_rm(Namespace(rm_type="math"), sample)) == 1


@pytest.mark.parametrize(("rm_type", "reward"), [("math", 1), ("boxed_dapo", 1.0), ("boxed_f1", 1.0), ("dapo", 1.0)])
@pytest.mark.parametrize("label", [42, 42.0, "42"])
def test_a_label_may_be_a_number(rm_type: str, reward: float, label: Any):
    sample = Sample(response="\\boxed{42}\nAnswer: 42", label=label)
    found = asyncio.run(async_rm(Namespace(rm_type=rm_type), sample))
    assert (found["score"] if isinstance(found, dict) else found) == reward


def test_random_rewards_leave_the_generator_of_users_alone():
    state = random.getstate()
    rewards = {asyncio.run(async_rm(Namespace(rm_type="random"), Sample())) for _ in range(50)}
    assert rewards == {0, 1}
    assert random.getstate() == state
