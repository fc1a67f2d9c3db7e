from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from slime.data.sample import Sample
from slime.rollout.rm_hub import async_rm, batched_async_rm, known_rm_types, rules, score_group
from slime.rollout.rm_hub.math_utils import (
    _strip_string,
    extract_answer,
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.rollout.rm_hub.rules import f1_score, grade_math_verify, normalize_answer
from slime.utils.errors import DataError, ScoringError
from tests.limits import unloaded_time

# --- the conventions of users' rewards


async def one_async(args, sample, **kwargs):
    return len(sample.response)


def one_sync(args, sample):
    return np.float32(0.25)


def batch(args, samples, **kwargs):
    return np.arange(len(samples))


def values(prompts, responses, labels):
    return [float(given == label) for given, label in zip(responses, labels, strict=True)]


async def one_or_many(args, sample: Sample | list[Sample], **kwargs):
    return [3.0] * len(sample) if isinstance(sample, list) else 1.0


class CustomReward:
    made = 0

    def __init__(self, model_path):
        type(self).made += 1
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return [f"{self.model_path}{type(self).made}" == "m1"] * len(responses)


def too_few(args, samples):
    return [1.0]


def blocks(args, samples):
    threading.Event().wait(60)


def nothing(args, sample):
    return None


async def slow_async(args, sample):
    await asyncio.sleep(30)


def marks_when_released(args, sample):
    args.released.wait(120)
    sample.remove_sample = True
    sample.metadata["seen"] = 1
    args.marked.set()
    return 1.0


def one_per_token(args, sample):
    return np.ones(3)


def not_finite(args, sample):
    return {"acc": float("nan"), "seconds": 1.0}


def own_timeout(args, sample):
    raise TimeoutError("socket")


def here(name):
    return f"{__file__}:{name}"


def rm_args(**values):
    return SimpleNamespace(**({"hf_checkpoint": "m", "rm_timeout": 5.0} | values))


def score(args, sample):
    return asyncio.run(async_rm(args, sample))


def score_all(args, samples):
    return asyncio.run(batched_async_rm(args, samples))


class NamedModel:
    def __init__(self, model_path):
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return [float(self.model_path == "judge")] * len(responses)


def test_a_reward_class_may_have_a_model_of_its_own():
    assert score(rm_args(custom_rm_path=here("NamedModel"), rm_model_path="judge"), Sample(response="x")) == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("one_async", 3), ("one_sync", 0.25), ("batch", 0), ("values", 1.0), ("one_or_many", 1.0), ("CustomReward", True)],
)
def test_every_convention_scores_a_single_sample(name, expected):
    assert score(rm_args(custom_rm_path=here(name)), Sample(response="abc", label="abc")) == expected


@pytest.mark.parametrize(
    ("name", "group_rm", "expected"),
    [
        ("one_async", False, [3, 1]),
        ("batch", False, [0, 1]),
        ("batch", True, [0, 1]),
        ("values", True, [1.0, 0.0]),
        ("one_or_many", False, [3.0, 3.0]),
        ("CustomReward", True, [True, True]),
    ],
)
def test_every_convention_scores_a_list(name, group_rm, expected):
    args = rm_args(custom_rm_path=here(name), group_rm=group_rm)
    assert score_all(args, [Sample(response="abc", label="abc"), Sample(response="d", label="e")]) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "returned 1 rewards for 2 samples"),
        ("nothing", "reward is of type NoneType; a reward is a number"),
        ("one_per_token", r"reward is a ndarray of shape \(3,\); a reward is one number"),
        ("not_finite", r"reward\['acc'\] is nan; a reward is a finite number"),
        ("own_timeout", "raised TimeoutError: socket"),
    ],
)
def test_unusable_results_name_function_and_sample(name, message):
    with pytest.raises(DataError, match=f"{name} on samples? 7.*{message}"):
        score_all(rm_args(custom_rm_path=here(name), reward_key="acc"), [Sample(index=7), Sample(index=7)])


@pytest.mark.parametrize(("name", "message"), [("too_few", "returned 1 rewards for 3 samples"), ("blocks", "0.2 s")])
def test_a_group_reward_that_blocks_or_leaves_one_out_fails_the_group_and_not_the_run(name, message):
    group = [Sample(index=index, tokens=[1, 2], response_length=1) for index in (7, 8, 9)]
    args = rm_args(custom_rm_path=here(name), group_rm=True, rm_timeout=0.2)
    asyncio.run(score_group(args, group))
    for sample in group:
        failure = sample.metadata["failure"]
        assert (failure["boundary"], failure["type"]) == ("reward", "ScoringError")
        assert f"{name} on samples 7, 8, 9" in failure["message"]
        assert message in failure["message"]


def test_an_async_reward_has_a_deadline_too():
    started = unloaded_time()
    with pytest.raises(DataError, match=r"slow_async on sample 2 did not return within 0.2 s"):
        score(rm_args(custom_rm_path=here("slow_async"), rm_timeout=0.2), Sample(index=2))
    assert unloaded_time() - started < 2


def test_a_late_reward_changes_nothing_and_one_in_time_may_change_the_sample():
    sample = Sample(index=2, metadata={})
    events = {"released": threading.Event(), "marked": threading.Event()}
    try:
        with pytest.raises(DataError, match=r"did not return within 0.2 s"):
            score(rm_args(custom_rm_path=here("marks_when_released"), rm_timeout=0.2, **events), sample)
    finally:
        events["released"].set()
    assert events["marked"].wait(120)
    assert (sample.remove_sample, sample.metadata) == (False, {})
    assert score(rm_args(custom_rm_path=here("marks_when_released"), **events), sample) == 1.0
    assert (sample.remove_sample, sample.metadata) == (True, {"seen": 1})


def test_sync_rewards_run_side_by_side():
    async def many():
        args = rm_args(custom_rm_path=here("sleeping"))
        await asyncio.gather(*(async_rm(args, Sample()) for _ in range(20)))

    started = unloaded_time()
    asyncio.run(many())
    assert unloaded_time() - started < 1.5


def sleeping(args, sample):
    time.sleep(0.2)
    return 0


# --- dispatch


def test_the_samples_own_function_wins_over_the_runs_and_the_datas_type_over_the_flags():
    sample = Sample(response="abc", custom_rm_path=here("one_async"))
    assert score(rm_args(custom_rm_path=here("one_sync")), sample) == 3
    assert score(rm_args(rm_type="math"), Sample(response="x", label="x", metadata={"rm_type": " f1 "})) == 1.0


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("math", r"so \boxed{\frac12}", "0.5", 1),
        ("boxed_math", r"so \boxed{7}", "7", 1),
        ("math", "7", "7", 0),
        ("f1", "a cat dog", "the cat", 2 / 3),
        ("boxed_f1", r"a dog \boxed{cat}", "the cat", 1.0),
        ("math_verify", r"\boxed{10^6}", "1000000", 1.0),
        ("math_verify", r"\boxed{5}", "6", 0.0),
    ],
)
def test_built_in_rules(rm_type, response, label, reward):
    assert score(rm_args(rm_type=rm_type), Sample(response=response, label=label)) == pytest.approx(reward)
    assert rm_type.removeprefix("boxed_") in known_rm_types()


def test_unknown_and_missing_types_are_errors():
    with pytest.raises(NotImplementedError, match=r"'sorcery' is unknown.*math"):
        score(rm_args(rm_type="sorcery"), Sample())
    with pytest.raises(NotImplementedError, match="--rm-type"):
        score(rm_args(), Sample())


def test_a_remote_service_gets_prompt_response_and_label_and_is_asked_again_after_an_error(engine):
    server = engine(lambda payload, number: (500, "") if number == 0 else (200, {"score": payload["label"]}))
    args = rm_args(rm_type="remote_rm", rm_url=f"{server.url}/score")
    assert score(args, Sample(prompt="p", response="r", label=2)) == {"score": 2}
    assert server.requests == [{"prompt": "p", "response": "r", "label": 2}] * 2


def test_a_sample_that_a_remote_service_refuses_fails_alone(engine):
    server = engine(lambda payload, number: (422, "too long"))
    with pytest.raises(ScoringError, match=r"remote_rm on sample 3.*status 422.*too long"):
        score(rm_args(rm_type="remote_rm", rm_url=f"{server.url}/score"), Sample(index=3))
    assert len(server.requests) == 1


def test_a_label_that_has_no_json_fails_its_sample_alone(engine):
    server = engine(lambda payload, number: (200, 1))
    with pytest.raises(ScoringError, match=r"remote_rm on sample 3: prompt or label cannot be sent as JSON.*bytes"):
        score(rm_args(rm_type="remote_rm", rm_url=f"{server.url}/score"), Sample(index=3, label=b"2"))
    assert server.requests == []


# --- math


def test_boxes_are_found():
    assert last_boxed_only_string(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\boxed{\frac{1}{2}}"
    assert last_boxed_only_string(r"\boxed{1} then \boxed{2") is None
    assert last_boxed_only_string(r"\fbox{3}") == r"\fbox{3}"
    assert remove_boxed(r"\boxed{x}") == "x"
    assert remove_boxed(r"\fbox{x}") is None
    assert remove_boxed(None) is None
    assert extract_boxed_answer(r"\boxed{a}") == extract_answer(r"\boxed{a}") == "a"
    assert extract_answer(r"\fbox{a}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\frac12", r"\frac{1}{2}"), (r"\tfrac{1}{2}", r"\frac{1}{2}"), (r"\left(1\right)", "(1)"),
        (r"45^\circ", "45"), (".7", "0.7"), (".5", r"\frac{1}{2}"), ("3/4", r"\frac{3}{4}"), ("1 + 1", "1+1"),
        ("", ""), ("k = 5", "5"), (r"\sqrt2", r"\sqrt{2}"),
    ],
)  # fmt: skip
def test_answers_are_normalised_like_hendrycks_math(text, expected):
    assert _strip_string(text) == expected
    assert mathd_normalize_answer(f"  {text} ") == expected
    assert mathd_normalize_answer(None) is None


SAME = [
    ("42", "42.0"), ("42.0", "42"), ("1,234", "1234"), ("1234", "1{,}234"), ("0.5", "1/2"), (".5", r"\frac12"),
    ("0.25", "1/4"), ("3.0/4", "3/4"), (r"50\%", "50"), (r"\$5", "5"), (r"5 \text{ cm}", "5"), ("5 cm", "5"),
    ("x=5", "5"), ("k=-2", "-2"), ("(1,2)", "(1, 2)"), ("1 or 2", "1,2"), (r"\sqrt 2", r"\sqrt{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\pi/2", r"\frac{\pi}{2}"), ("x+1", "1+x"), ("(x+1)^2", "x^2+2x+1"),
    ("x^{2}", "x^2"), (r"\text{(A)}", "A"), ("a", "A"), (r"\infty", "inf"), (r"45^\circ", "45"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\dfrac{3}{4}", "3/4"), (r"3\frac{1}{2}", "7/2"), (r"\text{yes}", "Yes"),
    (r"1\!000", "1000"), ("4.2e1", "42"), ("7 3/4", "31/4"), ("1", "1.0000000001"), ("5", "5."),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]  # fmt: skip
DIFFERENT = [
    ("0.333", "1/3"), ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("x^2", "y^2"), ("1 million", "1000000"),
    ("100", "100 dollars"), (r"1\,000", "1000"), ("e^x", "exp(x)"), ("", "1"), (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("2/4", "1/2"), ("10^6", "1000000"), ("2^{10}", "1024"), ("2^10", "1024"), (r"\sqrt{2}", "2^{1/2}"),
    (r"50\%", "0.5"), ("1,2", "2,1"), (r"\{1,2\}", r"\{2,1\}"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "gold"), SAME)
def test_answers_that_count_as_equal(given, gold):
    assert grade_answer_verl(rf"\boxed{{{given}}}", gold)
    assert grade_answer_mathd(given, gold) or grade_answer_sympy(given, gold)


@pytest.mark.parametrize(("given", "gold"), DIFFERENT)
def test_answers_that_count_as_different(given, gold):
    assert not grade_answer_verl(rf"\boxed{{{given}}}", gold)


def test_a_boxed_truth_is_unboxed_and_an_empty_one_matches_nothing():
    assert grade_answer_verl(r"\boxed{3}", r"\boxed{3}")
    assert not grade_answer_verl(r"\boxed{}", "")
    assert not grade_answer_verl("3", "3")


@pytest.mark.parametrize(
    ("given", "gold"), [(r"\frac{2}{4}", r"\frac{1}{2}"), (r"\{1,2\}", r"\{2,1\}"), ("10^6", "1000000")]
)
def test_math_verify_accepts_what_the_strict_rules_refuse(given, gold):
    assert grade_math_verify(rf"\boxed{{{given}}}", gold) == 1.0
    assert grade_math_verify(rf"\boxed{{{given}}}", None) == 0.0


def test_a_reward_whose_library_is_missing_ends_the_run_instead_of_being_zero(monkeypatch):
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install math-verify") as caught:
        score(rm_args(rm_type="math_verify"), Sample(response=r"\boxed{7}", label="7"))
    assert not isinstance(caught.value, ScoringError)  # which is the sample's own failure


# --- f1


def test_f1_is_squads():
    assert normalize_answer("The  Cat, a dog.") == "cat dog"
    assert normalize_answer("a.") == ""
    assert f1_score("the cat sat", "cat sat down") == (pytest.approx(2 * 2 / 5), 1.0, pytest.approx(2 / 3))
    assert f1_score("yes it is", "yes") == (0, 0, 0)
    assert f1_score("Yes", "yes") == (1.0, 1.0, 1.0)
    assert f1_score(None, "x") == f1_score("", "") == (0, 0, 0)


def test_a_remote_service_has_two_minutes_or_rm_timeout_if_that_is_longer(monkeypatch):
    given = []

    async def post(url, payload, **kwargs):
        given.append(kwargs["timeout_s"])
        return 1.0

    monkeypatch.setattr("slime.rollout.rm_hub.post", post)
    for seconds in (5.0, 300.0):
        score(rm_args(rm_type="remote_rm", rm_url="http://x", rm_timeout=seconds), Sample())
    assert given == [120.0, 300.0]
