"""Prompts that continue the sampled tokens, compared with rendering the whole conversation at every turn."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slime.agent.parsing import END_OF_THOUGHT
from slime.agent.rendering import TurnRenderer, history
from slime.agent.trajectory import Message, TrajectoryManager, TurnRecord
from slime.data.processing import load_tokenizer, render_chat, tokenize_chat
from slime.data.sample import Sample
from tests.unit.data.qwen_templates import QWEN2_5, QWEN3, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
NEXT_ROLE_ENDS_A_TURN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content | trim }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
"""No token after a message: the model ends its turn with the token that begins the next message."""
NO_EARLIER_THOUGHTS = NEXT_ROLE_ENDS_A_TURN.replace(
    "message.reasoning_content %}", "message.reasoning_content and loop.last %}"
)
TOOLS_BEFORE_THE_LAST_QUESTION = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for message in messages %}"
    "{% if message == users[-1] and tools %}{{ tools | tojson }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


class Session:
    """A client, an adapter without HTTP, and a model whose text is the one that the template writes."""

    def __init__(self, tokenizer: Any, tools: list[dict] | None, seed: int = 0) -> None:
        self.tokenizer, self.tools, self.draw = tokenizer, tools, random.Random(seed)
        self.renderer, self.manager = TurnRenderer(tokenizer), TrajectoryManager()
        self.messages: list[Message] = []
        self.reasons: list[tuple[str, str]] = []
        self.prompts: list[list[int]] = []

    def prompt(self) -> tuple[list[int], str]:
        held = history(self.manager.path("s", self.messages))
        return self.renderer.prompt_ids(self.messages, self.tools, held)

    def turn(self, new: list[Message], reply: Message, *, output: list[int] | None = None, **values: Any) -> TurnRecord:
        self.messages += new
        ids, reason = self.prompt()
        self.reasons.append((new[-1]["role"], reason))
        self.prompts.append(ids)
        if output is None:
            output = self.canonical(reply)
        turn = TurnRecord(
            ids,
            output,
            "stop",
            [-1.0] * len(output),
            has_thoughts=END_OF_THOUGHT in self.tokenizer.decode(output),
            tools=self.tools,
            rendered_whole=reason,
            **values,
        )
        self.manager.record_turn("s", turn=turn, prompt_messages=self.messages, response_message=reply)
        self.messages = [*self.messages, reply]
        return turn

    def canonical(self, reply: Message) -> list[int]:
        """``reply`` in the words of the template, with the token that ends a turn."""
        before = render_chat(self.tokenizer, self.messages, tools=self.tools, add_generation_prompt=True)
        end = [*self.messages, reply, {"role": "tool", "content": "?"}]
        rest = render_chat(self.tokenizer, end, tools=self.tools).removeprefix(before)
        mark = "<|im_end|>" if "<|im_end|>" in rest else "<|im_start|>"
        return list(self.tokenizer.encode(rest[: rest.index(mark) + len(mark)], add_special_tokens=False))

    def whole(self, messages: list[Message]) -> list[int]:
        return tokenize_chat(self.tokenizer, messages, tools=self.tools, add_generation_prompt=True)

    def random_reply(self, *, thinks: bool) -> Message:
        reply: Message = {"role": "assistant", "content": self.words() if self.draw.random() < 0.8 else ""}
        if thinks and self.draw.random() < 0.6:
            reply["reasoning_content"] = self.words()
        if self.tools and (self.draw.random() < 0.7 or not reply["content"]):
            arguments = {"at": self.words()}
            reply["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
        return reply

    def words(self) -> str:
        return " ".join(self.draw.choice(("a", "b12", "look", "is it", "(9)")) for _ in range(self.draw.randint(1, 6)))


def play(session: Session, num_turns: int, *, thinks: bool) -> None:
    """A random conversation. Asserts that every prompt is the whole conversation as the template renders it."""
    new: list[Message] = [{"role": "user", "content": session.words()}]
    if session.draw.random() < 0.5:
        new.insert(0, {"role": "system", "content": session.words()})
    for _ in range(num_turns):
        reply = session.random_reply(thinks=thinks)
        turn = session.turn(new, reply)
        assert turn.prompt_ids == session.whole(session.messages[:-1])
        count = session.draw.randint(1, 3)
        new = [{"role": "tool", "content": session.words()} for _ in range(count)]
        if not reply.get("tool_calls") or session.draw.random() < 0.2:
            new = [{"role": "user", "content": session.words()}]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("template", ["tiny", "qwen2.5", "next role"])
def test_a_prefix_stable_template_is_never_rendered_whole_and_every_prompt_equals_the_whole(template, seed, tiny_task):
    has_tools = template != "tiny"
    tokenizers = {"qwen2.5": QWEN2_5, "next role": NEXT_ROLE_ENDS_A_TURN}
    tokenizer = make_tokenizer(tokenizers[template]) if has_tools else load_tokenizer(tiny_task.model)
    session = Session(tokenizer, TOOLS if has_tools else None, seed)
    play(session, 12, thinks=template == "next role")
    assert {reason for _, reason in session.reasons} == {""}


@pytest.mark.parametrize("seed", range(6))
def test_a_template_that_drops_thoughts_before_the_last_question_is_rendered_whole_after_a_question_only(seed):
    session = Session(make_tokenizer(QWEN3), TOOLS, seed)
    play(session, 16, thinks=True)
    assert {reason for role, reason in session.reasons if role == "tool"} <= {""}
    dropped = {reason for role, reason in session.reasons[1:] if role == "user"}
    assert dropped <= {
        "the template leaves out the thoughts of an earlier turn",
        "the template changes the text before a turn when messages follow",
    }
    assert dropped


def test_thoughts_of_an_earlier_step_are_dropped_by_a_question_although_the_last_turn_had_none():
    session = Session(make_tokenizer(QWEN3), TOOLS)
    call = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    session.turn([{"role": "user", "content": "q"}], {"role": "assistant", "content": "", "tool_calls": call})
    for _ in range(3):
        plain = session.tokenizer.encode("so<|im_end|>", add_special_tokens=False)
        session.turn([{"role": "tool", "content": "t"}], {"role": "assistant", "content": "so"}, output=plain)
    assert [reason for _, reason in session.reasons] == [""] * 4
    session.messages.append({"role": "user", "content": "r"})
    ids, reason = session.prompt()
    assert (ids, reason) == (
        session.whole(session.messages),
        "the template changes the text before a turn when messages follow",
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_EARLIER_THOUGHTS, "the template leaves out the thoughts of an earlier turn"),
        (TOOLS_BEFORE_THE_LAST_QUESTION, "the template changes the text before a turn when messages follow"),
        (
            "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}",
            "does not end a turn with a special",
        ),
        (
            "{% for m in messages %}{{ raise_exception('no') if m.role == 'assistant' and loop.index0 == 1 }}"
            "{{ m.content + '<|im_end|>' }}{% endfor %}",
            "the chat template refuses the messages",
        ),
    ],
)
def test_another_template_is_rendered_whole_with_the_reason(template, reason):
    session = Session(make_tokenizer(template), TOOLS)
    reply = {"role": "assistant", "content": "b", "reasoning_content": "c" if "thoughts" in reason else ""}
    output = session.tokenizer.encode("<think>c</think>b" if "thoughts" in reason else "b", add_special_tokens=False)
    new = [{"role": "user", "content": "a"}]
    if "refuses" in reason:
        new.insert(0, {"role": "user", "content": "z"})
    session.turn(new, reply, output=output)
    session.messages.append({"role": "user", "content": "d"})
    ids, found = session.prompt()
    assert reason in found
    assert ids == session.whole(session.messages)


def test_sampled_tokens_stay_whatever_the_client_sends_back_and_however_they_are_encoded():
    session = Session(make_tokenizer(QWEN2_5), None)
    end = session.tokenizer.convert_tokens_to_ids("<|im_end|>")
    odd = session.tokenizer.encode(" \n so ", add_special_tokens=False)  # with space that the template would keep
    first = session.turn([{"role": "user", "content": "q"}], {"role": "assistant", "content": "so"}, output=[*odd, end])
    session.turn([{"role": "user", "content": "r"}], {"role": "assistant", "content": "t"})
    held = first.prompt_ids + first.output_ids
    text = "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    assert session.prompts[1] == held + session.tokenizer.encode(text, add_special_tokens=False)
    (sample,) = session.manager.get_trajectory("s", base_sample=Sample(index=0))
    assert sum(sample.loss_mask) == len(first.output_ids) + 2
    assert "rendered_whole" not in sample.metadata


def test_a_turn_that_was_cut_off_gets_its_end_from_the_template(tiny_task):
    session = Session(make_tokenizer(QWEN2_5), None)
    cut = session.tokenizer.encode("on", add_special_tokens=False)
    session.turn([{"role": "user", "content": "q"}], {"role": "assistant", "content": "on"}, output=cut)
    session.messages.append({"role": "user", "content": "r"})
    assert session.prompt() == (session.whole(session.messages), "")
    nothing = Session(load_tokenizer(tiny_task.model), None)
    nothing.turn([{"role": "user", "content": "q"}], {"role": "assistant", "content": ""}, output=[])
    nothing.messages.append({"role": "user", "content": "r"})
    assert nothing.prompt() == (nothing.whole(nothing.messages), "")


def test_a_turn_that_ends_with_another_token_than_the_templates_is_rendered_whole():
    session = Session(make_tokenizer(QWEN2_5), None)
    session.tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]}, replace_extra_special_tokens=False)
    output = session.tokenizer.encode("a<|end|>", add_special_tokens=False)
    session.turn([{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}, output=output)
    session.messages.append({"role": "user", "content": "r"})
    assert session.prompt() == (session.whole(session.messages), f"the template does not end a turn with {output[-1]}")


def test_changed_tools_and_a_reply_with_a_part_of_the_turn_are_reasons_that_the_sample_counts():
    session = Session(make_tokenizer(QWEN2_5), TOOLS)
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    session.turn([question], answer, is_shown=False)
    session.turn([question], answer)
    session.tools = None
    session.turn([question], answer)
    reasons = [reason for _, reason in session.reasons]
    assert reasons == ["", "the reply left out a part of the turn", "the client changed the tools"]
    counted = [
        sample.metadata.get("rendered_whole", {})
        for sample in session.manager.get_trajectory("s", base_sample=Sample(index=0))
    ]
    assert dict.fromkeys(reasons[1:], 1) == {key: value for each in counted for key, value in each.items()}


def test_a_turn_late_in_a_conversation_reads_as_much_text_as_an_early_one(monkeypatch):
    session = Session(make_tokenizer(QWEN2_5), TOOLS)
    call = [{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
    rendered: list[int] = []
    tokenizer, apply, encode = session.tokenizer, session.tokenizer.apply_chat_template, session.tokenizer.encode

    def counted_apply(messages, **values):
        rendered[-1] += len(str(messages))
        return apply(messages, **values)

    def counted_encode(text, **values):
        rendered[-1] += len(text)
        return encode(text, **values)

    new: list[Message] = [{"role": "user", "content": "q"}]
    for _ in range(40):
        session.messages += new
        monkeypatch.setattr(tokenizer, "apply_chat_template", counted_apply)
        monkeypatch.setattr(tokenizer, "encode", counted_encode)
        rendered.append(0)
        session.prompt()
        monkeypatch.undo()
        session.messages = session.messages[: len(session.messages) - len(new)]
        session.turn(new, {"role": "assistant", "content": "so", "tool_calls": call})
        new = [{"role": "tool", "content": "t" * 100}]
    assert len(set(rendered[3:])) == 1, rendered
