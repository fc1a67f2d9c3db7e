"""Opens ``--prompt-data`` with the flags that decide how its rows become prompts, and compares it when a run resumes.

Called by the data source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.data.arguments import PromptDataArgs
from slime.data.chat import load_tokenizer
from slime.data.media import load_processor
from slime.data.prepare import PromptMaker
from slime.data.prompts import Dataset, LoadedStream, Mixture, StreamingDataset, open_prompts
from slime.data.rows import identity
from slime.utils.errors import DataError
from slime.utils.prompt_sources import has_names, parse_sources


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
