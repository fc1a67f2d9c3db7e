"""A sample: one row of training data, from prompt to reward.

Made by the data source, filled by the rollout, read by all later steps and by users' hooks. ``Sample`` is public and
mutable. The order of its fields and its dictionary form are a contract. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from slime.utils.errors import DataError

Counters = TypeVar("Counters", bound="_Counters")


class _Counters:
    """Integer counters that round-trip through a dict. A missing key counts as 0."""

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls: type[Counters], data: dict[str, int]) -> Counters:
        return cls(**{item.name: data.get(item.name, 0) for item in fields(cls)})  # type: ignore[arg-type]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass
class _SpecInfo(_Counters):
    """Speculative decoding, summed over the requests of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens / draft tokens."""
        return _ratio(self.spec_accept_token_num, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Generated tokens per verification step."""
        return _ratio(self.completion_token_num, self.spec_verify_ct)

    def add(self, meta_info: dict[str, Any]) -> None:
        # The names that older engines use.
        accepted, drafted = (meta_info.get(name, 0) for name in ("spec_accept_token_num", "spec_draft_token_num"))
        self.spec_accept_token_num += meta_info.get("spec_num_correct_drafts", accepted)
        self.spec_draft_token_num += meta_info.get("spec_num_proposed_drafts", drafted)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class _PrefixCacheInfo(_Counters):
    """Prefix cache of the engine, summed over the requests of a sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Prompt tokens that were already in the engine's cache / prompt tokens."""
        return _ratio(self.cached_tokens, self.total_prompt_tokens)

    def add(self, meta_info: dict[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class _Attached:
    """Attributes that only some samples have. They are no fields, whose order is a contract.

    Attributes:
        trace: spans and events (``slime.observability.trace_utils``).
        stop_text: length of the response when the text of its stop token was removed, and that text.
        parts: (weight version, end) of each request, in deterministic runs. A list of lists: JSON has no tuples.
    """

    trace: dict[str, Any] | None = None
    stop_text: list[Any] | None = None
    parts: list[list[int | None]] | None = None


@dataclass(eq=False)  # identity equality and hash: fields may hold tensors, and two samples are never "the same" row
class Sample(_Attached):
    """One prompt with (eventually) its response, log-probs, mask and reward.

    ``L`` is the number of tokens, ``R`` the number of response tokens. Use keywords: positions follow the field order.

    Attributes:
        group_index: number of the prompt's group, one per prompt draw, increasing over the whole run.
        index: number of the sample, increasing over the whole run.
        rollout_id: id of the execution the sample came from; samples made from one execution share it; None: separate.
        prompt: text after templating, or chat messages, or another value of the data row, unchanged.
        tokens: prompt ids followed by response ids, ``[L]``.
        multimodal_inputs: raw media by kind (``images``, ``videos``).
        multimodal_train_inputs: outputs of the processor for them, besides ids and mask.
        multimodal_train_input_id: reserved.
        apply_chat_template_kwargs: reserved.
        response: decoded response, without the stop token that ended it (``--keep-stop-token-text`` keeps it).
        response_length: ``R``: everything after the first turn's prompt, tool output included.
        label: ground truth, any type.
        reward: a number, or a dict of numbers out of which ``--reward-key`` selects.
        loss_mask: ``[R]`` of 0 and 1. None trains on every response token.
        weight_versions: one entry per finished request.
        rollout_log_probs: natural-log probabilities of the sampled tokens under the engine's weights, ``[R]``.
        rollout_top_p_token_ids: ids of all nuclei, flattened.
        rollout_top_p_token_offsets: where each nucleus starts, ``[R + 1]``, first 0, last ``len(ids)``.
        rollout_routed_experts: expert choices of the engine, ``[L - 1, layers, topk]``.
        remove_sample: take part in reward normalization but not in the loss.
        teacher_log_probs: ``[R]``, distillation.
        status: progress of the sample.
        metadata: the data row's metadata and notes made on the way.
        generate_function_path: overrides ``--custom-generate-function-path`` for this sample.
        custom_rm_path: overrides ``--custom-rm-path`` for this sample.
        train_metadata: handed to the trainer as column ``metadata``.
        session_id: routing key for routers with session affinity.
        non_generation_time: seconds spent in tools and environments, for metrics only.
        spec_info: speculative decoding counters.
        prefix_cache_info: prefix cache counters.
    """

    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: Any = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the length limit. Older custom functions set it."""
        return self.status is _Status.TRUNCATED

    @truncated.setter
    def truncated(self, value: bool) -> None:
        if value:
            self.status = _Status.TRUNCATED
        elif self.status is _Status.PENDING:
            self.status = _Status.COMPLETED

    @property
    def effective_response_length(self) -> int:
        """Response tokens that carry loss."""
        mask = self.loss_mask
        if mask is None:
            return self.response_length
        # metrics ask this for every sample: counting takes a tenth of a sum's time
        return mask.count(1) if isinstance(mask, list) else int(sum(mask))

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or the entry of a reward dict that ``args.reward_key`` names."""
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def to_dict(self) -> dict[str, Any]:
        """Shallow copy of every attribute, also those that plugins attached. Tensors stay tensors."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The inverse of :meth:`to_dict`. Leaves ``data`` unchanged.

        Raises:
            KeyError: no ``status``.
            ValueError: unknown ``status``.
        """
        values = dict(data)
        values["status"] = _Status(values["status"])
        values["spec_info"] = _SpecInfo.from_dict(values.get("spec_info") or {})
        values["prefix_cache_info"] = _PrefixCacheInfo.from_dict(values.get("prefix_cache_info") or {})
        names = {item.name for item in fields(Sample)}
        sample = Sample(**{name: value for name, value in values.items() if name in names})
        for name, value in values.items():
            if name not in names:
                # An attribute that a plugin attached.
                setattr(sample, name, value)
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens and keep mask, log-probs, replay arrays, counters and status aligned with them.

        Args:
            args: needed only for what depends on flags (routed experts, speculative decoding).
            tokens: new ids, list or tensor.
            log_probs: their log-probabilities, required for trainable tokens, absent or all zero for others.
            trainable: False for tokens that the model did not write (tool output).
            meta_info: the engine's ``meta_info`` of the request.
            text: appended to ``response``.
            update_terminal_info: False for a chunk of an unfinished request: counters and status wait for the last one.

        Raises:
            ValueError: lengths that do not fit together, with the numbers.
        """
        from slime.data import engine_meta  # imports torch

        name, old_length = f"sample {self.index}", self.response_length
        new_tokens = [] if tokens is None else [int(token) for token in engine_meta.flat_list(tokens)]
        given = None if log_probs is None else [float(value) for value in engine_meta.flat_list(log_probs)]
        new_log_probs = _checked_log_probs(name, len(new_tokens), given, trainable)
        if new_tokens or text:
            # Put the text of the stop token back that the rollout had removed, unless a function appended text itself.
            length, stop_text = vars(self).pop("stop_text", (None, ""))
            if length == len(self.response):
                self.response += stop_text
        if text is not None:
            self.response += text
        if new_tokens:
            self.tokens += new_tokens  # every list grows in place: callers keep aliases of them
            self.response_length += len(new_tokens)
            if self.loss_mask is None:
                # Until now None: all earlier tokens are trained.
                self.loss_mask = [1] * old_length
            self.loss_mask += [int(trainable)] * len(new_tokens)
        if new_log_probs is not None:
            if self.rollout_log_probs is None:
                if trainable and old_length > 0:
                    raise ValueError(
                        f"{name}: its first {old_length} response tokens have no rollout log probabilities, so those "
                        "of the following tokens cannot be aligned"
                    )
                # Earlier tokens without log-probs get 0.
                self.rollout_log_probs = [0.0] * old_length
            self.rollout_log_probs += new_log_probs
        meta = meta_info or {}
        if new_tokens:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = engine_meta.extend_sets(
                name,
                self.rollout_top_p_token_ids,
                self.rollout_top_p_token_offsets,
                self.response_length,
                meta,
                len(new_tokens),
                pads_missing=not trainable,
            )
        self.rollout_routed_experts = engine_meta.extend_routed_experts(
            name, self.rollout_routed_experts, len(self.tokens), args, meta
        )
        if update_terminal_info and "finish_reason" in meta:
            self._finish(meta, getattr(args, "sglang_speculative_algorithm", None))
        self._check_lengths(name)

    def _finish(self, meta: dict[str, Any], speculative_algorithm: str | None) -> None:
        if speculative_algorithm:
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if "weight_version" in meta:
            self.weight_versions.append(meta["weight_version"])
        finish = meta["finish_reason"] or {}
        # An unknown reason leaves the status unchanged.
        self.status = _FINISH_TO_STATUS.get(str(finish.get("type")), self.status)

    def _check_lengths(self, name: str) -> None:
        length = self.response_length
        for kind, values in (("loss_mask", self.loss_mask), ("rollout_log_probs", self.rollout_log_probs)):
            if values is not None and len(values) != length:
                raise ValueError(f"{name}: {kind} has {len(values)} entries for {length} response tokens")
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if (ids is None) != (offsets is None):
            raise ValueError(f"{name}: top-p token ids and offsets must come together")
        if offsets is None:
            return
        if len(offsets) != length + 1:
            raise ValueError(f"{name}: {len(offsets)} top-p offsets for {length} response tokens")
        if int(offsets[-1]) != len(ids):
            raise ValueError(f"{name}: the last top-p offset is {int(offsets[-1])} for {len(ids)} ids")


_FINISH_TO_STATUS = {"length": _Status.TRUNCATED, "abort": _Status.ABORTED, "stop": _Status.COMPLETED}


def _checked_log_probs(name: str, num_tokens: int, values: list[float] | None, trainable: bool) -> list[float] | None:
    if values is not None and len(values) != num_tokens:
        raise ValueError(f"{name}: {len(values)} log probabilities for {num_tokens} tokens")
    if trainable:
        if num_tokens and values is None:
            raise ValueError(f"{name}: trainable response tokens require rollout log probabilities")
        return values
    if not num_tokens:
        return values
    if values is not None and any(values):
        raise ValueError(f"{name}: non-trainable response tokens should not pass rollout log probabilities")
    return [0.0] * num_tokens


for _name, _nested in (("Status", _Status), ("SpecInfo", _SpecInfo), ("PrefixCacheInfo", _PrefixCacheInfo)):
    _nested.__name__, _nested.__qualname__ = _name, f"Sample.{_name}"  # pickled and printed under the public name


SampleStatus = _Status
"""``Sample.Status`` under the name that older plugins import."""

SampleGroup: TypeAlias = "list[Sample | list[Sample]]"
"""The samples of one prompt. An entry is a list if one execution produced several samples (fan-out)."""


def iter_samples(node: Any) -> Iterator[Sample]:
    """Every sample under ``node``, in order, for any nesting of lists.

    Raises:
        TypeError: something that is neither a sample nor a list.
    """
    if isinstance(node, Sample):
        yield node
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
        for item in node:
            yield from iter_samples(item)
    else:
        raise TypeError(f"expected a Sample or a list of them, got {type(node).__name__}")


def as_groups(items: Sequence[Any], make_group: Callable[[Sample], SampleGroup]) -> list[SampleGroup]:
    """Groups stay unchanged. Flat samples with the same ``group_index`` form one. A sample without it forms a group.

    Args:
        make_group: turns a single prompt into a group.

    Raises:
        DataError: anything else than groups or samples.
    """
    if all(isinstance(item, list) for item in items):
        return list(items)
    if not all(isinstance(item, Sample) for item in items):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise DataError(f"expected groups (lists of Sample) or samples from or for the data source, got {kinds}")
    groups: list[SampleGroup] = []
    by_index: dict[int, SampleGroup] = {}
    for sample in items:
        if sample.group_index is None:
            groups.append(make_group(sample))
        elif sample.group_index in by_index:
            by_index[sample.group_index].append(sample)
        else:
            by_index[sample.group_index] = [sample]
            groups.append(by_index[sample.group_index])
    return groups
