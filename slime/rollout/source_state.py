"""The state of data sources: the prompt data as the flags open them, compared when a run resumes, and the state files.

State files of data sources and of the journal are written completely or not at all. They are JSON, unless samples hold
tensors or have more than ``_MANY_TOKENS`` tokens. Then lists of numbers are packed into tensors, which take 9 to 13
bytes per token instead of 30.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data.arguments import PromptDataArgs
from slime.data.prepare import PromptMaker
from slime.data.processing import load_processor, load_tokenizer, media_from_state, media_to_state
from slime.data.prompts import Dataset, LoadedStream, Mixture, StreamingDataset, open_prompts
from slime.data.rows import identity
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.utils.errors import DataError
from slime.utils.files import replacing
from slime.utils.prompt_sources import has_names, parse_sources

FIX = "delete it to start from the first prompt"


def state_path(directory: str, rollout_id: int | None) -> Path:
    """State of the data source after a rollout, without its suffix: ``.json`` or ``.pt``."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}"


def outstanding_path(directory: str, rollout_id: int | None) -> Path:
    """File of the prompts that were under way at that moment, without its suffix."""
    return Path(directory) / "rollout" / f"outstanding_{rollout_id}"


def numbers_path(directory: str, rollout_id: int | None) -> Path:
    """File of the numbers of the next group and sample, for sources that do not count, without its suffix."""
    return Path(directory) / "rollout" / f"numbers_{rollout_id}"


_MANY_TOKENS = 100_000
_PACKED = {"tokens": "i", "loss_mask": "b", "rollout_log_probs": "d", "teacher_log_probs": "d"}
"""Field -> type code of an array for it."""


def groups_to_dicts(groups: Sequence[Any]) -> list[Any]:
    """Groups, or samples without groups, as values of a state file."""
    packs = sum(len(sample.tokens) for sample in iter_samples(groups)) > _MANY_TOKENS
    return [_to_dict(item, packs) for item in groups]


def group_from_dicts(group: Any) -> Any:
    """A group or sample of :func:`groups_to_dicts`."""
    if isinstance(group, dict):
        return _from_dict(group)
    return [
        _from_dict(item) if isinstance(item, dict) else list(iter_samples(group_from_dicts(item))) for item in group
    ]


def _to_dict(item: Any, packs: bool) -> Any:
    if not isinstance(item, Sample):
        return [_to_dict(each, packs) for each in item]
    values = item.to_dict() | {"multimodal_inputs": media_to_state(item.multimodal_inputs)}
    if packs:
        packed = {name: _packed(values[name], code) for name, code in _PACKED.items()}
        values["packed"] = {name: tensor for name, tensor in packed.items() if tensor is not None}
        values |= dict.fromkeys(values["packed"])
    return values


def _packed(values: Any, code: str) -> Any:
    """A tensor of the numbers in a list. None if it would not give them back."""
    import torch

    if not isinstance(values, list) or not values:
        return None
    try:
        numbers = array(code, values)
    except (TypeError, OverflowError):  # a user's function put something else there
        return None
    tensor = torch.frombuffer(numbers, dtype={"i": torch.int32, "b": torch.int8, "d": torch.float64}[code])
    short = tensor.float()
    return short if code == "d" and torch.equal(short.double(), tensor) else tensor  # engines compute in float32


def _from_dict(values: dict[str, Any]) -> Sample:
    unpacked = {name: tensor.tolist() for name, tensor in values.get("packed", {}).items()}
    values = {name: value for name, value in values.items() if name != "packed"} | unpacked
    return Sample.from_dict(values | {"multimodal_inputs": media_from_state(values.get("multimodal_inputs"))})


def save_groups(path: Path, groups: list[SampleGroup]) -> None:
    """Write groups. Without groups the file is deleted."""
    if groups:
        write_state(path, {"groups": groups_to_dicts(groups)})
    else:
        delete_state(path)  # a file of an earlier save would return the same prompts again


def load_groups(path: Path) -> list[SampleGroup]:
    """Read the groups of :func:`save_groups`."""
    state = read_state(path) or {"groups": []}
    return [group_from_dicts(group) for group in state["groups"]]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``path.json``, or ``path.pt`` if JSON would change the values."""
    write_encoded(path, *encoded(state))


def encoded(state: dict[str, Any]) -> tuple[str, bytes]:
    """Suffix and content of a state file."""
    try:
        text = json.dumps(state)
        if json.loads(text) == state:  # JSON turns tuples into lists and number keys into text
            return ".json", text.encode()
    except (TypeError, ValueError):
        pass
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return ".pt", buffer.getvalue()


def write_encoded(path: Path, suffix: str, content: bytes) -> None:
    """Write the result of :func:`encoded`."""
    with replacing(
        path.with_suffix(suffix), sync=True
    ) as partial:  # the checkpoint that counts on it is flushed as well
        partial.write_bytes(content)
    # A file of an earlier save with the other suffix could be read instead of this one.
    path.with_suffix(".pt" if suffix == ".json" else ".json").unlink(missing_ok=True)


def delete_state(path: Path) -> None:
    """Delete a state file, if there is one."""
    path.with_suffix(".json").unlink(missing_ok=True)
    path.with_suffix(".pt").unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """Read the file of :func:`write_state`. Returns None if it does not exist.

    Raises:
        DataError: a damaged file.
    """
    from slime.data.dump_file import load_saved  # imports torch: not for the rules of flags

    as_json, as_torch = path.with_suffix(".json"), path.with_suffix(".pt")
    try:
        if as_json.is_file():
            return dict(json.loads(as_json.read_text(encoding="utf-8")))
        return dict(load_saved(as_torch)) if as_torch.is_file() else None
    except (ValueError, TypeError) as error:
        damaged, reason = as_json if as_json.is_file() else as_torch, str(error) or type(error).__name__
        raise DataError(f"{damaged}: damaged: {reason.splitlines()[0]}; {FIX}") from error


@dataclass(frozen=True)
class PromptData(PromptDataArgs):
    """The flags of prompt data, with those of other groups that decide about prompts."""

    prompt_data: str = ""
    hf_checkpoint: str = ""
    rollout_max_prompt_len: int | None = None

    def dataset(self, path: str = "") -> Dataset:
        """The prompts of ``--prompt-data``, or of one of its sources."""
        if not path and has_names(self.prompt_data):
            raise DataError(
                f"--prompt-data {self.prompt_data}: several sources cannot be one Dataset, which --data-source-path "
                f"{self.data_source_path} takes: give one source, or a class that takes args alone"
            )
        return Dataset(
            path or self.prompt_data,
            seed=self.rollout_seed,
            num_workers=self.num_data_workers,
            skips_bad_lines=self.skip_bad_lines,
            **self._of_rows(),
        )

    def stream(self) -> StreamingDataset | Mixture:
        sources = parse_sources(self.prompt_data)
        if [source.name for source in sources] == [""]:
            return self._streamed(self.prompt_data)
        streams: dict[str, tuple[float, StreamingDataset | LoadedStream]] = {}
        for source in sources:
            if self.streaming_data:
                streams[source.name] = source.weight, self._streamed(source.path)
            else:
                loaded = LoadedStream(self.dataset(source.path), shuffles=self.rollout_shuffle)
                streams[source.name] = source.weight, loaded
        return Mixture(streams)

    def _streamed(self, path: str) -> StreamingDataset:
        maker, read = open_prompts(path, PromptMaker(**self._of_rows()), skips_bad_lines=self.skip_bad_lines)
        return StreamingDataset(
            read,
            maker,
            name=f"--prompt-data {path}",
            seed=self.rollout_seed,
            shuffles=self.rollout_shuffle,
            num_workers=self.num_data_workers,
        )

    def _of_rows(self) -> dict[str, Any]:
        has_media = self.multimodal_keys is not None
        return {
            "tokenizer": load_tokenizer(self.hf_checkpoint, trust_remote_code=True),
            "processor": load_processor(self.hf_checkpoint, trust_remote_code=True) if has_media else None,
            "max_length": self.rollout_max_prompt_len,
            "multimodal_keys": self.multimodal_keys,
            "special_tokens_as_text": self.special_tokens_as_text,
            "prompt_key": self.input_key,
            "label_key": self.label_key,
            "metadata_key": self.metadata_key,
            "tool_key": self.tool_key,
            "apply_chat_template": self.apply_chat_template,
            "apply_chat_template_kwargs": self.apply_chat_template_kwargs,
        }


# The order of prompts: its fingerprint is kept in the data state. A position (epoch, row) means the same prompt only if
# the sources and these settings are the same.

_ORDER = ("streaming_data", "rollout_shuffle", "n_samples_per_prompt")
_OTHER = ("seed", "rollout_seed", "input_key", "label_key", "apply_chat_template", "rollout_max_prompt_len")


def fingerprint(values: Mapping[str, Any], num_prompts: int | None) -> dict[str, Any] | None:
    """Fingerprint of ``--prompt-data`` and of the flags that decide the order, as JSON values.

    Args:
        values: of flags by name.
        num_prompts: in one epoch, without those that are too long. None for a stream.

    Returns:
        None if ``--prompt-data`` names something that cannot be read here.
    """
    sources = parse_sources(values["prompt_data"])
    found = [identity(source.path) for source in sources]
    if None in found:
        return None
    flags = {name: values.get(name) for name in (*_ORDER, *_OTHER)}
    result = {"prompts": num_prompts, "flags": flags}
    if len(found) == 1 and not sources[0].name:
        return (found[0] or {}) | result
    named = zip(sources, found, strict=True)
    return {"sources": {source.name: (known or {}) | {"weight": source.weight} for source, known in named}} | result


def _source_changes(what: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if (old.get("size"), old.get("digest")) != (new.get("size"), new.get("digest")):
        yield f"the content of {what} (it had {_sized(old)}, now it has {_sized(new)})"
    if old.get("slice") != new.get("slice"):
        yield f"the slice of {what} (it was {old.get('slice')}, now it is {new.get('slice')})"
    if old.get("weight") != new.get("weight"):
        yield f"the weight of {what} (it was {old.get('weight')}, now it is {new.get('weight')})"


def _sized(source: dict[str, Any]) -> str:
    return f"{source.get('size')} {source.get('unit', 'bytes')}"


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Differences between ``old`` and ``new``: those that change the order of prompts, and the others."""
    order: list[str] = []
    other: list[str] = []
    old_sources, new_sources = old.get("sources", {}), new.get("sources", {})
    if list(old_sources) != list(new_sources):
        order.append(
            f"the sources of --prompt-data (they were {_names(old_sources)}, now they are {_names(new_sources)})"
        )
    else:
        order += _source_changes("--prompt-data", old, new)
        for name, source in new_sources.items():
            order += _source_changes(f"source {name} of --prompt-data", old_sources[name], source)
    # A changed file or slice changes this number too, and is already reported.
    if not order and old.get("prompts") != new["prompts"] and None not in (old.get("prompts"), new["prompts"]):
        order.append(f"the number of usable prompts (it was {old.get('prompts')}, now it is {new['prompts']})")
    before, now = old.get("flags", {}), new["flags"]
    for name in now:
        if name in before and before[name] != now[name]:
            text = f"--{name.replace('_', '-')} (it was {before[name]}, now it is {now[name]})"
            # Rows that are not shuffled come in the order of the file, whatever the seed is.
            decides = name in _ORDER or (name == "rollout_seed" and now["rollout_shuffle"])
            (order if decides else other).append(text)
    return order, other


def _names(sources: dict[str, Any]) -> str:
    return ", ".join(sources) or "one without a name"
