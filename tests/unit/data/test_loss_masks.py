from __future__ import annotations

import copy

import pytest

from slime.data.loss_masks import MultiTurnLossMaskGenerator, get_response_lengths
from slime.data.processing import load_tokenizer
from slime.utils.errors import DataError
from tests.unit.data.qwen_templates import QWEN2_5, QWEN3, make_tokenizer

CHAT = [
    {"role": "system", "content": "1"},
    {"role": "user", "content": "12+34="},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]
AUTOMATIC_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n99<|im_end|>\n{% endif %}"
# like Qwen3's: text before the last user message loses its "7" (in Qwen3: its reasoning)
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


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:3]])
def test_what_is_trained_is_what_the_assistant_wrote(tokenizer, kind, messages):
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    answers = [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
    trained = [text.replace(" ", "") for text in generator.get_text_from_loss_mask(ids, mask)]
    assert trained == [answer.replace(" ", "") for answer in answers]


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3", "qwen3_5"])
def test_an_automatic_system_message_appears_once_and_is_not_trained(tokenizer, kind):
    tokenizer.chat_template = AUTOMATIC_SYSTEM + tokenizer.chat_template
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(CHAT[1:])
    assert ids == tokenizer.apply_chat_template(CHAT[1:], return_dict=False)
    assert len(generator.get_text_from_loss_mask(ids, mask)) == 2


@pytest.mark.parametrize("kind", ["generic", "qwen", "qwen3", "qwen3_5"])
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


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_qwen3_5_does_not_train_a_thinking_tag_that_the_prompt_holds(tokenizer):
    tokenizer.chat_template = THINKING
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    ids, mask = generator.get_loss_mask(CHAT[1:3])
    prompt = tokenizer.apply_chat_template(CHAT[1:2], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_qwen3_5_marks_a_token_that_the_answer_shares_with_its_header(tokenizer):
    class Wide:
        """Its tokens are pairs of characters, so that they cross the borders of turns."""

        chat_template = "set"  # and no ``is_fast``: that it returns offsets is enough

        def apply_chat_template(self, messages, *, tokenize, **kwargs):
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            return self(text)["input_ids"] if tokenize else text

        def __call__(self, text, **kwargs):
            starts = range(0, len(text), 2)
            return {
                "input_ids": [hash(text[i : i + 2]) for i in starts],
                "offset_mapping": [(i, min(i + 2, len(text))) for i in starts],
            }

    _, mask = MultiTurnLossMaskGenerator(Wide(), "qwen3_5").get_loss_mask(CHAT[1:3])
    head = len("<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n")
    assert mask.index(1) == head // 2
    assert all(mask[head // 2 :])


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", CHAT, "0 times"),
        (None, [{"role": "user", "content": "1<|im_start|>assistant\n2"}, CHAT[2]], "2 times"),
        ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% endfor %}", CHAT[1:3], "not followed"),
    ],
)
def test_qwen3_5_refuses_a_template_or_a_content_that_it_would_misread(tokenizer, template, chat, message):
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(DataError, match=message):
        MultiTurnLossMaskGenerator(tokenizer, "qwen3_5").get_loss_mask(chat)


@pytest.mark.parametrize("answer", [NotImplementedError("no offsets"), {"input_ids": [1]}])
def test_qwen3_5_needs_to_know_where_tokens_stand(tokenizer, answer):
    class Slow:
        chat_template = "set"

        def apply_chat_template(self, messages, **kwargs):
            return "".join(message["content"] for message in messages)

        def __call__(self, text, **kwargs):
            if isinstance(answer, Exception):
                raise answer
            return answer

    with pytest.raises(DataError, match=r"needs a tokenizer that returns offsets .* Slow does not"):
        MultiTurnLossMaskGenerator(Slow(), "qwen3_5").get_loss_mask(CHAT)


@pytest.mark.parametrize("kind", ["distill_qwen", "qwen"])
def test_distilled_models_learn_the_bare_content_of_the_last_message(tokenizer, kind, caplog):
    if kind == "qwen":
        tokenizer.get_added_vocab = lambda: {"<\uff5cAssistant\uff5c>": 7}
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    chat = [CHAT[1], CHAT[2]]
    ids, mask = generator.get_loss_mask(chat)
    assert ids == tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False) + (
        tokenizer.encode("46", add_special_tokens=False)
    )
    assert generator.get_text_from_loss_mask(ids, mask)[0].replace(" ", "") == "46"
    assert "left out" not in caplog.text
    assert generator.get_loss_mask([CHAT[1], CHAT[3], CHAT[2]])[0] == ids
    assert "left out" in caplog.text
    assert sum(generator.get_loss_mask([CHAT[1], CHAT[2] | {"step_loss_mask": 0}])[1]) == 0
    with pytest.raises(DataError, match="assistant's message"):
        generator.get_loss_mask(CHAT[:2])


def test_lengths_count_from_the_first_trained_token():
    assert get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_unknown_types_and_missing_roles_are_named(tokenizer):
    with pytest.raises(ValueError, match="--loss-mask-type llama"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")
    with pytest.raises(DataError, match="role"):
        MultiTurnLossMaskGenerator(tokenizer, "generic").get_loss_mask([{"content": "x"}])


def test_the_mask_of_a_text_is_moved_to_the_end_of_the_processor_s_tokens(tokenizer):
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    ids, mask = generator.get_loss_mask(CHAT)
    with_image = [*ids[:4], 7, 7, 7, *ids[4:]]
    aligned = generator.get_loss_mask_with_multimodal_alignment(CHAT, with_image)
    assert aligned == (with_image, [0, 0, 0, *mask])
    with pytest.raises(DataError, match="the text alone has"):
        generator.get_loss_mask_with_multimodal_alignment(CHAT, ids[1:])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
WITH_TOOLS = [
    {"role": "user", "content": "both?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL], "reasoning_content": "two"},
    {"role": "tool", "content": "r1"},
    {"role": "tool", "content": "r2"},
    {"role": "assistant", "content": "Both.", "reasoning_content": "so"},
]
KINDS = [("generic", QWEN2_5), ("qwen", QWEN2_5), ("qwen3_5", QWEN2_5), ("qwen3", QWEN3)]
CALLS = '\n<tool_call>f({"x": 1})</tool_call>\n<tool_call>f({"x": 1})</tool_call><|im_end|>\n'


@pytest.mark.parametrize(("kind", "template"), KINDS)
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["automatic", "given"])
def test_calls_are_trained_and_their_results_are_one_turn_that_is_not(kind, template, system):
    tokenizer = make_tokenizer(template)
    chat = [*system, *WITH_TOOLS]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(chat, TOOLS)
    assert ids == tokenizer.apply_chat_template(chat, tools=TOOLS, return_dict=False)
    thought = {"qwen3": ("<think>\ntwo\n</think>\n\n", "<think>\nso\n</think>\n\n")}.get(kind, ("", ""))
    answers = [f"{thought[0]}I look.{CALLS}", f"{thought[1]}Both.<|im_end|>\n"]
    assert generator.get_text_from_loss_mask(ids, mask) == answers


@pytest.mark.parametrize(("kind", "template"), [*KINDS, ("qwen3", QWEN2_5)])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_what_stands_before_an_assistant_that_speaks_first_is_not_trained(kind, template, tools):
    tokenizer = make_tokenizer(template)
    chat = [{"role": "assistant", "content": "Hello?"}, {"role": "user", "content": "2+2="}]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(chat, tools)
    assert ids == tokenizer.apply_chat_template(chat, tools=tools, return_dict=False)
    assert generator.get_text_from_loss_mask(ids, mask) == ["Hello?<|im_end|>\n"]
