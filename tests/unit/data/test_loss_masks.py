from __future__ import annotations

import copy

import pytest

from slime.data.chat import load_tokenizer
from slime.data.loss_masks import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.errors import DataError

CHAT = [
    {"role": "system", "content": "1"},
    {"role": "user", "content": "12+34="},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]
AUTOMATIC_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n99<|im_end|>\n{% endif %}"
# like Qwen3's: what stands before the last user message loses its "7" (there: its reasoning)
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'] | replace('7', '') }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_task):
    return copy.copy(load_tokenizer(tiny_task.model))


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3"])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:3]])
def test_what_is_trained_is_what_the_assistant_wrote(tokenizer, kind, messages):
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    answers = [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
    trained = [text.replace(" ", "") for text in generator.get_text_from_loss_mask(ids, mask)]
    assert trained == [answer.replace(" ", "") for answer in answers]


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3"])
def test_an_automatic_system_message_appears_once_and_is_not_trained(tokenizer, kind):
    tokenizer.chat_template = AUTOMATIC_SYSTEM + tokenizer.chat_template
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(CHAT[1:])
    assert ids == tokenizer.apply_chat_template(CHAT[1:], return_dict=False)
    assert len(generator.get_text_from_loss_mask(ids, mask)) == 2


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3"])
def test_a_message_with_step_loss_mask_0_is_not_trained(tokenizer, kind):
    chat = [*CHAT[:2], CHAT[2] | {"step_loss_mask": 0}, *CHAT[3:]]
    _, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(chat)
    assert get_response_lengths([mask]) == [len(tokenizer.encode("4<|im_end|>\n", add_special_tokens=False))]


def test_qwen3_keeps_what_the_template_forgets_and_generic_refuses_to_guess(tokenizer):
    tokenizer.chat_template = FORGETFUL
    chat = [CHAT[1], {"role": "assistant", "content": "746"}, *CHAT[3:]]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3")
    ids, mask = generator.get_loss_mask(chat)
    assert generator.get_text_from_loss_mask(ids, mask)[0].replace(" ", "").startswith("746")
    with pytest.raises(DataError, match="message 1 differently"):
        MultiTurnLossMaskGenerator(tokenizer, "generic").get_loss_mask(chat)


def test_lengths_count_from_the_first_trained_token():
    assert get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_unknown_types_and_missing_roles_are_named(tokenizer):
    with pytest.raises(ValueError, match="--loss-mask-type llama"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")
    with pytest.raises(DataError, match="role"):
        MultiTurnLossMaskGenerator(tokenizer, "generic").get_loss_mask([{"content": "x"}])
