"""What requests ask of the engine follows from the flags, of training and of evaluation."""

from __future__ import annotations

from types import SimpleNamespace

from slime.data.sample import Sample
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.evaluate import _with_eval_limits
from slime.rollout.sampling import eval_sampling_params, response_room, train_sampling_params
from slime.rollout.sft_rollout import _fill
from tests.unit.rollout.fake_engine import make_args


def test_training_requests_keep_the_text_of_their_stop_tokens() -> None:
    args = make_args("/model", 0, rollout_temperature=0.7, rollout_stop=["###"], rollout_stop_token_ids=[2])
    assert train_sampling_params(args) == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop": ["###"],
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_an_evaluation_set_has_settings_of_its_own() -> None:
    config = EvalDatasetConfig("a", "x", temperature=0.0, top_p=0.9, top_k=5, max_response_len=3, min_new_tokens=2)
    params = eval_sampling_params(config)
    assert [params[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")] == [0.0, 0.9, 5, 3]
    assert (params["min_new_tokens"], params["no_stop_trim"]) == (2, True)
    assert "repetition_penalty" not in params


def test_evaluation_has_its_own_context_length() -> None:
    args = make_args("/model", 0, rollout_max_context_len=16, eval_max_context_len=12)
    prompt = Sample(prompt="1+1=")
    assert response_room(_with_eval_limits(args), prompt, 10, 8) == 2
    assert response_room(args, prompt, 10, 8) == 6


def test_a_conversation_that_is_trained_from_its_first_token_keeps_it_as_the_prompt() -> None:
    generator = SimpleNamespace(get_loss_mask=lambda messages, tools: ([5, 6, 7], [1, 1, 1]))
    sample = Sample(prompt=[{"role": "assistant", "content": "hello"}])
    assert _fill(sample, generator)  # type: ignore[arg-type]
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([5, 6, 7], 2, [1, 1])
