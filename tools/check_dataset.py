#!/usr/bin/env python3
"""Look through a prompt file before a run does: every row, every problem, and how long the prompts are.

    python tools/check_dataset.py train.jsonl --input-key prompt --label-key label
    python tools/check_dataset.py 'train.parquet@[0:1000]' --hf-checkpoint /models/Qwen3-4B --apply-chat-template

Reads .jsonl and .parquet as training does, but does not stop at the first problem. With --hf-checkpoint the prompts are
rendered and measured in tokens. Exit status 1 when a row cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.config.groups import add_group
from slime.data.arguments import PromptDataArgs
from slime.utils.errors import ConfigError, DataError, SlimeError

_MOST_SHOWN = 20
# 0 and 100 are the shortest and the longest prompt.
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclass
class Report:
    """The findings."""

    num_rows: int = 0
    problems: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    prompts: Counter[str] = field(default_factory=Counter)
    label_types: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="A .jsonl or .parquet file; FILE@[a:b] is a slice of its rows.")
    parser.add_argument("--hf-checkpoint", help="Render and measure the prompts with this tokenizer.")
    parser.add_argument("--max-prompt-len", type=int, help="Report prompts with more tokens.")
    add_group(parser, PromptDataArgs)
    options = parser.parse_args()
    if options.max_prompt_len is not None and options.hf_checkpoint is None:
        raise ConfigError("--max-prompt-len needs --hf-checkpoint: lengths are counted in its tokens.")
    report = check(options)
    print_report(report, options)
    raise SystemExit(1 if report.problems else 0)


def check(options: argparse.Namespace) -> Report:
    """Every row of the file."""
    from slime.data.prepare import PromptMaker
    from slime.data.prompts import open_prompts
    from slime.data.rows import numbered_rows

    tokenizer = None
    if options.hf_checkpoint is not None:
        from slime.data.processing import load_tokenizer

        tokenizer = load_tokenizer(options.hf_checkpoint, trust_remote_code=False)
    elif options.apply_chat_template:
        raise ConfigError("--apply-chat-template needs --hf-checkpoint, whose template it is.")
    settings = PromptMaker(
        tokenizer,
        prompt_key=options.input_key,
        multimodal_keys=options.multimodal_keys,
        label_key=options.label_key,
        tool_key=options.tool_key,
        metadata_key=options.metadata_key,
        apply_chat_template=options.apply_chat_template,
        apply_chat_template_kwargs=options.apply_chat_template_kwargs,
        # A limit makes the maker count tokens, but this one never drops a prompt: --max-prompt-len reports instead.
        max_length=None if tokenizer is None else sys.maxsize,
    )
    maker, _ = open_prompts(options.file, settings)
    report = Report()
    # The handler keeps rows that cannot be parsed from ending the check.
    for where, row in numbered_rows(options.file, lambda error: report.problems.append(str(error))):
        report.num_rows += 1
        report.keys.update(row.keys())
        try:
            (prepared,) = maker.make([(where, row)])
        except DataError as error:
            report.problems.append(str(error))
            continue
        sample = prepared.sample
        # A prompt may be a list of messages, which is not hashable.
        report.prompts[json.dumps(sample.prompt, default=str)] += 1
        report.label_types[type(sample.label).__name__] += 1
        if prepared.num_tokens is not None:
            report.lengths.append(prepared.num_tokens)
            if options.max_prompt_len is not None and prepared.num_tokens > options.max_prompt_len:
                report.problems.append(f"{where}: {prepared.num_tokens} tokens are more than {options.max_prompt_len}")
    return report


def print_report(report: Report, options: argparse.Namespace) -> None:
    for problem in report.problems[:_MOST_SHOWN]:
        print(f"problem: {problem}")
    if (hidden := len(report.problems) - _MOST_SHOWN) > 0:
        print(f"... and {hidden} more problems")
    print(f"{options.file}: {report.num_rows} rows, {len(report.problems)} problems")
    print(f"fields: {_listed(report.keys)}")
    print(f"labels: {_listed(report.label_types)}")
    if again := sum(count - 1 for count in report.prompts.values()):
        print(f"{again} prompts are there more than once")
    if report.lengths:
        lengths = sorted(report.lengths)
        shown = [f"p{p} {lengths[min(len(lengths) - 1, p * len(lengths) // 100)]}" for p in _PERCENTILES]
        print(f"prompt tokens: {', '.join(shown)}, {sum(lengths):,} in all")


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common()) or "none"


if __name__ == "__main__":
    try:
        main()
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        # 1 means that rows cannot be used, 2 that the check could not run.
        raise SystemExit(2) from None
