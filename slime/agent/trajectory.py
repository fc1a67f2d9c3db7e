"""The turns of an agent as a tree of messages, and their conversion to training samples.

Adapters record every turn (:meth:`TrajectoryManager.record_turn`) and turn a finished session into samples
(:meth:`TrajectoryManager.get_trajectory`). Messages decide the position of a turn in the tree. Token ids decide how the
turns of a branch are joined into samples. Knows no HTTP and no tokenizer.

    record_turn     follows the prompt's messages from the root. New messages become nodes, the reply a leaf
    get_trajectory  leaf by leaf, the turns on the way are joined:
                      CLEAN    the next prompt continues the tokens held            -> append the new tokens, masked
                      REALIGN  it differs only inside the last response             -> that response loses its training,
                                                                counted in metadata["abandoned_response_tokens"]
                      FORK     it differs before that, or the next output is long   -> a separate sample
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, TypeAlias

from slime.data.sample import Sample

logger = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
RewardSplit: TypeAlias = Literal["full", "equal"]

DEFAULT_FORK_THRESHOLD_TOKENS = 1024
_EXPERTS = "routed_experts"
_TEXT_KEYS = ("content", "reasoning_content")


@dataclass(frozen=True)
class TurnRecord:
    """One request to the engine and its reply.

    Attributes:
        prompt_ids: tokens of the request, ``[P]``.
        output_ids: sampled tokens, ``[O]``.
        finish_reason: the engine's: ``stop``, ``length``, ``abort``.
        output_log_probs: natural-log probabilities of ``output_ids``, ``[O]``, empty if unknown.
        ill_formed: the output holds a tool call that could not be parsed.
        meta_info: the engine's ``meta_info``: weight version, nuclei, routed experts, cache counters.
        has_thoughts: the output has reasoning, which clients need not send back.
        tools: the tools that the prompt offered.
        is_shown: the client received every tool call of the output.
        rendered_whole: why the prompt does not continue the ids of the turn before it. "" if it does, or is the first.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float] = field(default_factory=list)
    ill_formed: bool = False
    meta_info: dict[str, Any] | None = None
    has_thoughts: bool = False
    tools: list[dict[str, Any]] | None = None
    is_shown: bool = True
    rendered_whole: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class MessageNode:
    """One message of a session. Its path from the root is a conversation.

    Attributes:
        turn: of an assistant message that the engine generated, else None.
        turn_index: number of the turn in its session, from 1.
        response_trained: a sample already trains on the turn. Others show it masked.
    """

    role: str | None = None
    message: Message | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    parent: MessageNode | None = None
    children: list[MessageNode] = field(default_factory=list)
    turn: TurnRecord | None = None
    turn_index: int | None = None
    response_trained: bool = False

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def add_child(self, child: MessageNode) -> MessageNode:
        child.parent = self
        self.children.append(child)
        return child

    def path_from_root(self) -> list[MessageNode]:
        """The nodes from below the root down to this one."""
        path: list[MessageNode] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def leaves(self) -> list[MessageNode]:
        """Leaves below this node, depth first, older children first."""
        found: list[MessageNode] = []
        pending = [self]
        while pending:
            node = pending.pop()
            pending += reversed(node.children)
            if not node.children:
                found.append(node)
        return found


class DriftKind(Enum):
    """How the next prompt relates to the tokens held."""

    CLEAN = auto()
    REALIGN = auto()
    FORK = auto()


@dataclass
class _Session:
    """The message tree of a session, its number of turns, and the time of the last one."""

    root: MessageNode = field(default_factory=MessageNode)
    num_turns: int = 0
    last_used: float = field(default_factory=time.monotonic)


class TrajectoryManager:
    """The message trees of all sessions.

    Args:
        fork_threshold_tokens: an output shorter than this may be given up for the sake of one sample instead of two,
            when a client replays it differently than it was sampled. 0 never gives one up. None: 1024.
        reward_split: ``full`` gives every sample of a session its whole reward, ``equal`` divides it among them.
        args: the run's arguments, needed for the shape of routed experts.
    """

    def __init__(
        self, *, fork_threshold_tokens: int | None = None, reward_split: RewardSplit = "full", args: Any = None
    ) -> None:
        if reward_split not in ("full", "equal"):
            raise ValueError(f"reward_split is {reward_split!r}: use 'full' or 'equal'")
        self._threshold = DEFAULT_FORK_THRESHOLD_TOKENS if fork_threshold_tokens is None else fork_threshold_tokens
        self._reward_split = reward_split
        self._args = args
        self._sessions: dict[str, _Session] = {}

    def has_session(self, sid: str) -> bool:
        return sid in self._sessions

    def turn_count(self, sid: str) -> int:
        """Turns recorded so far."""
        return self._sessions[sid].num_turns if sid in self._sessions else 0

    def path(self, sid: str, messages: Sequence[Message]) -> list[MessageNode]:
        """The nodes of the recorded messages that ``messages`` begin with."""
        return _follow(self._sessions[sid].root, messages)[0].path_from_root() if sid in self._sessions else []

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Message],
        response_message: Message,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Put a turn into its place in the tree.

        Args:
            prompt_messages: the conversation that was sent, oldest first.
            response_message: the reply, in the form in which the client will send it back.
        """
        if not prompt_messages:
            logger.warning("session %s: a turn without messages is not recorded", sid)
            return
        num_log_probs, num_ids = len(turn.output_log_probs), len(turn.output_ids)
        assert num_log_probs in (0, num_ids), f"output_log_probs has {num_log_probs} values for {num_ids} output ids"
        session = self._sessions.setdefault(sid, _Session())
        session.last_used = time.monotonic()
        node, num_matched = _follow(session.root, prompt_messages)
        if num_matched < len(prompt_messages):
            reply = self._merge_rewrite(sid, node, prompt_messages[num_matched])
            node, num_matched = (reply, num_matched + 1) if reply else (node, num_matched)
        for message in prompt_messages[num_matched:]:
            node = node.add_child(MessageNode(role=message.get("role"), message=message, metadata=dict(metadata or {})))
        session.num_turns += 1
        leaf = MessageNode(role="assistant", message=response_message, metadata=dict(metadata or {}))
        leaf.turn, leaf.turn_index = turn, session.num_turns
        node.add_child(leaf)

    def _merge_rewrite(self, sid: str, node: MessageNode, message: Message) -> MessageNode | None:
        """Replace a short last reply by the text in which the client sent it back. Returns it if it was replaced."""
        replies = [child for child in node.children if child.role == "assistant"]
        if self._threshold <= 0 or message.get("role") != "assistant" or not replies:
            return None
        if len(replies) > 1:
            logger.warning("session %s: a reply came back changed, and there are %d it may be", sid, len(replies))
            return None
        (reply,) = replies
        if reply.children or reply.turn is None or len(reply.turn.output_ids) >= self._threshold:
            return None
        reply.metadata["merged_rewrite"] = {
            "abandoned_turn_index": reply.turn_index,
            "abandoned_response_tokens": len(reply.turn.output_ids),
        }
        # The sampled tokens are no longer part of the conversation, so they cannot be trained.
        reply.message, reply.turn, reply.turn_index = message, None, None
        return reply

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Any = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """The samples of a session, which is forgotten.

        Args:
            base_sample: gives prompt, label and ids.
            reward: of the whole session: a number, or a dict of numbers.
            max_sample_tokens: longer samples are cut there (status TRUNCATED). 0 cuts nothing.

        Returns:
            One sample per run of tokens that can be joined, each with trained tokens, by last turn. [] if unknown.
        """
        session = self._sessions.pop(sid, None)
        if session is None:
            return []
        built = [builder for leaf in session.root.leaves() for builder in self._join(leaf)]
        built.sort(key=lambda builder: builder.nodes[-1].turn_index or 0)
        samples = [
            sample
            for builder in built
            if (sample := builder.to_sample(base_sample, extra_metadata or {}, max_sample_tokens))
        ]
        for sample in samples:
            sample.reward = _divided(reward, len(samples)) if self._reward_split == "equal" else reward
        return samples

    def _join(self, leaf: MessageNode) -> Iterator[_SampleBuilder]:
        builder: _SampleBuilder | None = None
        num_abandoned = 0  # of merged rewrites, for the next turn's sample
        for node in leaf.path_from_root():
            if node.turn is None:
                if not node.response_trained:  # counted once, in the first sample that has it
                    num_abandoned += node.metadata.get("merged_rewrite", {}).get("abandoned_response_tokens", 0)
                    node.response_trained = True
                continue
            kind = DriftKind.FORK if builder is None else builder.drift(node.turn, self._threshold)
            if builder is None or kind is DriftKind.FORK:
                if builder is not None:
                    yield builder
                builder = _SampleBuilder(self._args, list(node.turn.prompt_ids), len(node.turn.prompt_ids))
            else:
                builder.continue_with(node.turn.prompt_ids, kind)
            builder.add_response(node)
            builder.num_abandoned, num_abandoned = builder.num_abandoned + num_abandoned, 0
        if builder is not None:
            yield builder

    def drop_session(self, sid: str) -> None:
        self._sessions.pop(sid, None)

    def drop_idle(self, max_idle_s: float) -> list[str]:
        """Forget unfinished sessions without a turn for ``max_idle_s`` seconds. Returns their ids."""
        limit = time.monotonic() - max_idle_s
        idle = [sid for sid, session in self._sessions.items() if session.last_used < limit]
        for sid in idle:
            self.drop_session(sid)
        return idle


@dataclass
class _Part:
    """A run of response tokens: a turn's output, or context (``node`` is None)."""

    tokens: list[int]
    node: MessageNode | None = None
    is_trained: bool = False

    @property
    def meta_info(self) -> dict[str, Any]:
        return (self.node and self.node.turn and self.node.turn.meta_info) or {}


@dataclass
class _SampleBuilder:
    """Joins turns into one sample. The tokens held are always prompt and output of the last turn."""

    args: Any
    tokens: list[int]
    num_leading: int
    parts: list[_Part] = field(default_factory=list)
    nodes: list[MessageNode] = field(default_factory=list)  # of all turns, also of those whose response was replaced
    last_start: int | None = None
    num_abandoned: int = 0

    def drift(self, turn: TurnRecord, threshold: int) -> DriftKind:
        common = _common_prefix_len(self.tokens, turn.prompt_ids)
        if common == len(self.tokens):
            return DriftKind.CLEAN
        # Only the last response can be removed. A change before it needs another sample.
        is_in_last = self.last_start is not None and common >= self.last_start
        return DriftKind.REALIGN if is_in_last and len(turn.output_ids) < threshold else DriftKind.FORK

    def continue_with(self, prompt_ids: list[int], kind: DriftKind) -> None:
        """Hold ``prompt_ids``, whose end is context that the model did not write here."""
        if kind is DriftKind.REALIGN:
            assert self.last_start is not None
            last = self.parts.pop()  # the last response, which the following tokens replace
            self.num_abandoned += len(last.tokens) if last.is_trained else 0
            del self.tokens[self.last_start :]
        self._append(_Part(prompt_ids[len(self.tokens) :]))

    def add_response(self, node: MessageNode) -> None:
        assert node.turn is not None
        self.last_start = len(self.tokens)
        self.nodes.append(node)
        # A turn that several branches share is trained in the first sample only.
        self._append(_Part(node.turn.output_ids, node, is_trained=not node.response_trained))
        node.response_trained = True

    def _append(self, part: _Part) -> None:
        self.parts.append(part)
        self.tokens += part.tokens

    def to_sample(self, base: Sample, extra_metadata: dict[str, Any], max_sample_tokens: int) -> Sample | None:
        """None without a trained token."""
        turns = [node.turn for node in self.nodes if node.turn is not None]
        sample = Sample(
            group_index=base.group_index,
            index=base.index,
            # Samples of one session share the rollout id, so that they count as one rollout in the loss.
            rollout_id=base.index if base.rollout_id is None else base.rollout_id,
            prompt=base.prompt,
            label=base.label,
            tokens=self.tokens[: self.num_leading],
            loss_mask=[],
            rollout_log_probs=[],
        )
        # The choices of a request cover all tokens before it. A last turn without room for a request has none.
        newest = next((part for part in reversed(self.parts) if _EXPERTS in part.meta_info), None)
        for part in self.parts:
            self._add_part(sample, part, has_experts=part is newest)
        was_cut = 0 < max_sample_tokens < len(sample.tokens)
        if was_cut:
            _cut(sample, max_sample_tokens)
        if not any(sample.loss_mask or ()):
            return None
        is_truncated = was_cut or turns[-1].finish_reason == "length"
        sample.status = Sample.Status.TRUNCATED if is_truncated else Sample.Status.COMPLETED
        sample.metadata = extra_metadata | {
            "truncated": is_truncated,
            "use_tool": any(bool((node.message or {}).get("tool_calls")) for node in self.nodes),
            "ill_formed": any(turn.ill_formed for turn in turns),
        }
        if reasons := Counter(turn.rendered_whole for turn in turns if turn.rendered_whole):
            sample.metadata["rendered_whole"] = dict(reasons)
        if self.num_abandoned:
            sample.metadata["abandoned_response_tokens"] = self.num_abandoned
        return sample

    def _add_part(self, sample: Sample, part: _Part, has_experts: bool) -> None:
        turn = part.node.turn if part.node is not None else None
        if turn is None:
            sample.append_response_tokens(self.args, tokens=part.tokens, trainable=False)
            return
        meta = {"finish_reason": {"type": turn.finish_reason}} | part.meta_info
        if not has_experts:
            meta.pop(_EXPERTS, None)
        # Unknown log-probs. ``append_response_tokens`` refuses trained tokens without any.
        log_probs = turn.output_log_probs or [0.0] * len(turn.output_ids)
        sample.append_response_tokens(self.args, tokens=turn.output_ids, log_probs=log_probs, meta_info=meta)
        if not part.is_trained and part.tokens:
            assert sample.loss_mask is not None
            sample.loss_mask[-len(part.tokens) :] = [0] * len(part.tokens)


def _cut(sample: Sample, num_tokens: int) -> None:
    """Keep the first ``num_tokens`` tokens. A cap inside the prompt leaves no response."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    length = max(0, sample.response_length - (len(sample.tokens) - num_tokens))
    sample.tokens = sample.tokens[:num_tokens]
    sample.loss_mask = sample.loss_mask[:length]
    sample.rollout_log_probs = sample.rollout_log_probs[:length]
    sample.response_length = length
    if sample.rollout_top_p_token_offsets is not None:
        sample.rollout_top_p_token_offsets = sample.rollout_top_p_token_offsets[: length + 1]
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[: int(sample.rollout_top_p_token_offsets[-1])]
    if sample.rollout_routed_experts is not None:
        # One row per token but the last.
        sample.rollout_routed_experts = sample.rollout_routed_experts[: num_tokens - 1]


def _follow(root: MessageNode, messages: Sequence[Message]) -> tuple[MessageNode, int]:
    """The deepest node that ``messages`` lead to, and how many of them lead there."""
    node = root
    for number, message in enumerate(messages):
        same = (child for child in node.children if child.role == message.get("role") and _same(child, message))
        child = next(same, None)
        if child is None:
            return node, number
        node = child
    return node, len(messages)


def _same(node: MessageNode, message: Message) -> bool:
    if node.message is None or node.message == message:
        return node.message == message
    known, given = _essence(node.message), _essence(message)
    if "reasoning_content" not in known or "reasoning_content" not in given:
        known.pop("reasoning_content", None)  # clients are free to send thoughts back or not
        given.pop("reasoning_content", None)
    return known == given


def _essence(message: Message) -> Message:
    """The message without space around texts and without empty keys, which clients change."""
    texts = {key: message[key].strip() for key in _TEXT_KEYS if isinstance(message.get(key), str)}
    return {key: value for key, value in (message | texts).items() if value not in (None, "", [])}


def _common_prefix_len(a: Sequence[int], b: Sequence[int], chunk: int = 4096) -> int:
    """Number of equal leading elements. Slices are compared, which is fast."""
    limit = min(len(a), len(b))
    start = 0
    while start < limit and a[start : start + chunk] == b[start : start + chunk] and start + chunk <= limit:
        start += chunk
    while start < limit and a[start] == b[start]:
        start += 1
    return start


def _divided(reward: Any, count: int) -> Any:
    if isinstance(reward, dict):
        return {name: value / count for name, value in reward.items()}
    return reward / count
