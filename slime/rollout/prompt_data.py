"""Open ``--prompt-data`` with the flags that decide how its rows become prompts. Called by the data source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.data.arguments import PromptDataArgs
from slime.data.chat import load_tokenizer
from slime.data.media import load_processor
from slime.data.prepare import PromptMaker
from slime.data.prompts import Dataset, LoadedStream, Mixture, StreamingDataset, open_prompts
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
