"""Open ``--prompt-data`` with the flags that decide how its rows become prompts. Called by the data source."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data.chat import load_tokenizer
from slime.data.media import load_processor
from slime.data.prompts import Dataset, LoadedStream, Mixture, StreamingDataset, open_prompts
from slime.utils.errors import DataError
from slime.utils.prompt_sources import has_names, parse_sources


def load_dataset(args: Namespace, path: str | None = None) -> Dataset:
    """The prompts of ``--prompt-data``, or of one of its sources."""
    if path is None and has_names(args.prompt_data):
        raise DataError(
            f"--prompt-data {args.prompt_data}: several sources cannot be one Dataset, which --data-source-path "
            f"{args.data_source_path} takes: give one source, or a class that takes args alone"
        )
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    return Dataset(
        path or args.prompt_data,
        tokenizer,
        _processor(args),
        args.rollout_max_prompt_len,
        seed=args.rollout_seed,
        num_workers=args.num_data_workers,
        **_row_settings(args),
    )


def open_stream(args: Namespace) -> StreamingDataset | Mixture:
    sources = parse_sources(args.prompt_data)
    if [source.name for source in sources] == [""]:
        return _open_one(args, args.prompt_data)
    streams: dict[str, tuple[float, StreamingDataset | LoadedStream]] = {}
    for source in sources:
        if args.streaming_data:
            streams[source.name] = source.weight, _open_one(args, source.path)
        else:
            loaded = LoadedStream(load_dataset(args, source.path), shuffles=args.rollout_shuffle)
            streams[source.name] = source.weight, loaded
    return Mixture(streams)


def _open_one(args: Namespace, path: str) -> StreamingDataset:
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    limit = args.rollout_max_prompt_len
    maker, read = open_prompts(path, tokenizer, processor=_processor(args), max_length=limit, **_row_settings(args))
    return StreamingDataset(
        read,
        maker,
        name=f"--prompt-data {path}",
        max_length=args.rollout_max_prompt_len,
        seed=args.rollout_seed,
        shuffles=args.rollout_shuffle,
        num_workers=args.num_data_workers,
    )


def _processor(args: Namespace) -> Any:
    return None if args.multimodal_keys is None else load_processor(args.hf_checkpoint, trust_remote_code=True)


def _row_settings(args: Namespace) -> dict[str, Any]:
    return {
        "multimodal_keys": args.multimodal_keys,
        "skips_bad_lines": args.skip_bad_lines,
        "special_tokens_as_text": args.special_tokens_as_text,
        "prompt_key": args.input_key,
        "label_key": args.label_key,
        "metadata_key": args.metadata_key,
        "tool_key": args.tool_key,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
    }
