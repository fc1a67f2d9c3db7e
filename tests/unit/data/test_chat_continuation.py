"""The text between two turns of a model, in the form of its chat template and without the turn itself."""

from __future__ import annotations

import pytest

from slime.data.processing import load_tokenizer, render_chat, render_continuation
from slime.utils.errors import DataError

NEXT = [{"role": "user", "content": "no."}]
WHOLE = "<|im_end|>\n<|im_start|>user\nno.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer(tiny_task):
    return load_tokenizer(tiny_task.model)


def test_a_turn_that_was_cut_at_a_stop_string_gets_its_end_and_one_with_its_end_token_does_not(tokenizer):
    assert render_continuation(tokenizer, NEXT, tokens=tokenizer.encode("4")) == WHOLE
    assert render_continuation(tokenizer, NEXT, tokens=tokenizer.encode("4<|im_end|>")) == WHOLE[len("<|im_end|>") :]
    assert render_continuation(tokenizer, NEXT) == WHOLE


def test_turn_and_continuation_are_the_conversation_as_the_template_renders_it(tokenizer):
    held = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "5"}]
    told = [{"role": "user", "content": "too high."}, {"role": "user", "content": "again?"}]
    prompt = render_chat(tokenizer, held[:1], add_generation_prompt=True)
    whole = render_chat(tokenizer, [*held, *told], add_generation_prompt=True)
    assert prompt + "5" + render_continuation(tokenizer, told) == whole


def test_a_template_that_drops_earlier_turns_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(DataError, match="leaves out the assistant's turn"):
        render_continuation(tokenizer, NEXT)
