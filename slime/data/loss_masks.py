"""Which tokens of a conversation are the assistant's: ids and loss masks for supervised training.

Five ways to find them, because chat templates treat messages differently:

    generic   render growing prefixes of the conversation; the text of an assistant message is trained. Fits every
              template that renders a message the same way whatever follows it. Other templates are an error.
    qwen      render each message, or run of tool messages, alone and cut the automatic system text off.
    qwen3     render each of them next to a dummy user message and cut that away, because the template drops the
              reasoning of assistant messages that lie before the last user message.
    qwen3_5   render the conversation once as text and find the assistant's turns in it; for templates that look at the
              whole conversation. Needs a tokenizer that knows the place of each token in the text.
    distill_qwen
              the first message is the prompt, the content of the last one is the response. For models that were
              distilled from DeepSeek-R1, whose template drops reasoning; qwen does the same for their tokenizers.

In all of them a message with ``step_loss_mask`` other than 1 is not trained. Called by the SFT rollout.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.data.processing import render_chat, tokenize_chat
from slime.utils.errors import DataError

Message = Mapping[str, Any]
Masked = tuple[list[int], list[int]]

logger = logging.getLogger(__name__)

_DUMMY_USER: Message = {"role": "user", "content": "0"}
_HEADER = "<|im_start|>assistant\n"
_END = "<|im_end|>"
_THINK = "<think>\n"
_DISTILLED = "<\uff5cAssistant\uff5c>"
"""Special token of the models distilled from DeepSeek-R1, with full-width bars."""


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """For each mask the length from its first 1 to its end; 0 without a trained token."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


def _is_trained(message: Message) -> bool:
    return bool(message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1)


def _runs(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Single messages, but tool messages that follow each other together: templates make one turn of them."""
    for role, run in itertools.groupby(messages, lambda message: message["role"]):
        if role == "tool":
            yield list(run)
        else:
            yield from ([message] for message in run)


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of conversations.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tokenizer_type: ``generic``, ``qwen``, ``qwen3``, ``qwen3_5`` or ``distill_qwen``.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        methods = {
            "generic": self.gen_multi_turn_loss_mask_generic,
            "qwen": self.gen_multi_turn_loss_mask_qwen,
            "qwen3": self.gen_multi_turn_loss_mask_qwen3,
            "qwen3_5": self.gen_multi_turn_loss_mask_qwen3_5,
            "distill_qwen": self.gen_multi_turn_loss_mask_distill_qwen,
        }
        if tokenizer_type not in methods:
            raise ValueError(f"--loss-mask-type {tokenizer_type} is unknown; use one of {', '.join(methods)}")
        if tokenizer_type == "qwen" and _DISTILLED in tokenizer.get_added_vocab():
            tokenizer_type = "distill_qwen"
        self._method = methods[tokenizer_type]
        self._has_warned = False
        if tokenizer_type in ("qwen", "qwen3"):
            self.system_message_length, self.gen_token_length = self.get_system_message_length()

    def get_loss_mask(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Masked:
        """``(ids, mask)``, equally long; the mask is 1 on the tokens of the assistant, end-of-turn token included.

        Raises:
            DataError: messages that the template, or the chosen way of masking, cannot render.
        """
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise DataError("supervised training needs a non-empty list of messages with a 'role' each")
        return self._method(messages, tools)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Sequence[Message], input_ids: Sequence[int], tools: list[Any] | None = None
    ) -> Masked:
        """``input_ids`` of a processor, which replaces the one token of an image by many, and their mask.

        The mask is that of the text, moved to the end: media must precede the first trained token.

        Raises:
            DataError: fewer ids than the text has tokens.
        """
        text_ids, mask = self.get_loss_mask(messages, tools)
        missing = len(input_ids) - len(text_ids)
        if missing < 0:
            raise DataError(f"the processor made {len(input_ids)} tokens, and the text alone has {len(text_ids)}")
        return list(input_ids), [0] * missing + mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
        """The decoded runs of trained tokens."""
        runs: list[list[int]] = []
        previous = 0
        for token, flag in zip(token_ids, loss_mask, strict=True):
            if flag:
                if not previous:
                    runs.append([])
                runs[-1].append(token)
            previous = flag
        return [self.tokenizer.decode(run) for run in runs]

    def get_system_message_length(self) -> tuple[int, int]:
        """Tokens that the template puts before a conversation by itself, and tokens of its generation prompt."""
        one = self._ids([_DUMMY_USER])
        two = self._ids([_DUMMY_USER, _DUMMY_USER])
        prompted = self._ids([_DUMMY_USER], add_generation_prompt=True)
        # one = automatic text + message, two = automatic text + 2 messages.
        return 2 * len(one) - len(two), len(prompted) - len(one)

    def gen_multi_turn_loss_mask_generic(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Masked:
        """Prefix differences of the conversation as it is rendered."""
        ids = self._ids(messages, tools)
        mask = [0] * len(ids)
        for i, message in enumerate(messages):
            if not _is_trained(message):
                continue
            # The header of the turn is not trained, because the prompt of a rollout ends with it.
            before = self._ids(messages[:i], tools, add_generation_prompt=True) if i else self._opening(ids)
            through = self._ids(messages[: i + 1], tools)
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise DataError(
                    f"the chat template renders message {i} differently when other messages follow it, so "
                    "--loss-mask-type generic cannot tell what the assistant wrote: use qwen or qwen3, or one "
                    "assistant message per row"
                )
            mask[len(before) : len(through)] = [1] * (len(through) - len(before))
        return ids, mask

    def _opening(self, ids: list[int]) -> list[int]:
        """The tokens before the first message of a conversation that the assistant opens."""
        asked = self._ids([_DUMMY_USER])
        header = self._ids([_DUMMY_USER], add_generation_prompt=True)[len(asked) :]
        ends = range(len(header), len(ids) + 1)
        end = next((end for end in ends if ids[end - len(header) : end] == header), None)
        if end is None:
            raise DataError(
                "an assistant message comes first, which --loss-mask-type generic cannot mask here: use qwen"
            )
        return ids[:end]

    def gen_multi_turn_loss_mask_qwen(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Masked:
        """Every message, or run of tool messages, rendered alone."""
        ids: list[int] = []
        mask: list[int] = []
        for run in _runs(messages):
            part = self._ids(run, None if ids else tools)
            skip = 0
            if not ids:
                # The text about tools and the automatic text precede the message and belong to no message.
                skip = len(part) - (len(self._ids(run)) - self.system_message_length)
            # A system message replaces the automatic text, so there is nothing to cut off.
            elif run[0]["role"] != "system":
                part = part[self.system_message_length :]
            ids += part
            mask += self._message_mask(run[0], len(part), skip)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen3(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Masked:
        """Every message, or run of tool messages, rendered next to a dummy user message."""
        dummy = self._ids([_DUMMY_USER])

        def before_dummy(run: Sequence[Message], tools: list[Any] | None) -> list[int]:
            both = self._ids([*run, _DUMMY_USER], tools)
            return both[: len(both) - (len(dummy) - self.system_message_length)]

        ids: list[int] = []
        mask: list[int] = []
        for run in _runs(messages):
            skip = 0
            if ids:
                part = self._ids([_DUMMY_USER, *run])[len(dummy) :]
            else:
                part = before_dummy(run, tools)
                skip = len(part) - (len(before_dummy(run, None)) - self.system_message_length)
            ids += part
            mask += self._message_mask(run[0], len(part), skip)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen3_5(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Masked:
        """The assistant's turns in the text of the whole conversation, without a ``<think>`` of the prompt."""
        text = render_chat(self.tokenizer, messages, tools=tools)
        ids, offsets = self._with_offsets(text)
        if ids != self._ids(messages, tools):
            raise DataError(
                "the chat template's tokens are not those of its text: --loss-mask-type qwen3_5 cannot work"
            )
        is_marked = bytearray(len(text))
        for start, end in self._turns(messages, text):
            is_marked[start:end] = b"\1" * (end - start)
        # A token that crosses the border of a turn belongs to the turn.
        return ids, [int(any(is_marked[start:end])) for start, end in offsets]

    def _with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the place of each in the text. Tokenizers that cannot tell it raise, or leave it out."""
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(encoded["input_ids"]), list(encoded["offset_mapping"])
        except (NotImplementedError, TypeError, KeyError) as error:
            raise DataError(
                "--loss-mask-type qwen3_5 needs a tokenizer that returns offsets (return_offsets_mapping), and "
                f"{type(self.tokenizer).__name__} does not ({type(error).__name__}): use a fast tokenizer"
            ) from error

    def _turns(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """Positions in ``text`` of the trained turns, end-of-turn token and line break included."""
        assistants = [message for message in messages if message["role"] == "assistant"]
        if text.count(_HEADER) != len(assistants):
            raise DataError(
                f"the conversation has {len(assistants)} assistant messages, but its text has {text.count(_HEADER)} "
                f"times {_HEADER!r}: --loss-mask-type qwen3_5 does not fit its template or its content"
            )
        turns: list[tuple[int, int]] = []
        cursor = 0
        for message in assistants:
            start = text.index(_HEADER, cursor) + len(_HEADER)
            cursor = text.find(_END, start)
            if cursor < 0:
                raise DataError(
                    f"an assistant message is not followed by {_END}: --loss-mask-type qwen3_5 does not fit"
                )
            cursor += len(_END)
            cursor += text.startswith("\n", cursor)
            if _is_trained(message):
                # The generation prompt of such a template ends with <think>, so the model does not write it.
                turns.append((start + (len(_THINK) if text.startswith(_THINK, start) else 0), cursor))
        return turns

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> Masked:
        """First message and generation prompt, then the bare content of the last message."""
        answer = messages[-1]
        if len(messages) < 2 or answer["role"] != "assistant":
            raise DataError("--loss-mask-type distill_qwen needs a prompt and, last, the assistant's message")
        if len(messages) > 2 and not self._has_warned:
            logger.warning("--loss-mask-type distill_qwen: messages between the first and the last one are left out")
            self._has_warned = True
        prompt = self._ids(messages[:1], tools, add_generation_prompt=True)
        response = list(self.tokenizer(answer["content"], add_special_tokens=False)["input_ids"])
        return prompt + response, [0] * len(prompt) + [int(_is_trained(answer))] * len(response)

    def _message_mask(self, message: Message, length: int, skip: int) -> list[int]:
        """``skip``: tokens of the part that belong to no message, such as the text about tools."""
        if not _is_trained(message):
            return [0] * length
        start = min(length, skip + self.gen_token_length)
        return [0] * start + [1] * (length - start)

    def _ids(
        self, messages: Sequence[Message], tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return tokenize_chat(self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt)
