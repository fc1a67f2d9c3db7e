#!/usr/bin/env python3
"""Turn rollout dumps into one Parquet file, for pandas, DuckDB or ``datasets.load_dataset("parquet", ...)``.

    python tools/rollouts_to_parquet.py /runs/dump/0.pt /runs/dump/1.pt --output samples.parquet

The dumps are those of --save-debug-rollout-data (and of --dump-details). A row is a sample: prompt, response, label,
reward (``reward`` as a number, and every part of a reward that has parts as ``reward_<part>``), status, lengths, weight
versions, metadata as JSON text. --tokens adds ids, loss mask and log-probs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.utils.errors import ConfigError, SlimeError
from slime.utils.files import replacing

if TYPE_CHECKING:
    from slime.data.sample import Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", metavar="FILE", help="Rollout dumps.")
    parser.add_argument("--output", required=True, metavar="FILE", help="The .parquet file to write.")
    parser.add_argument("--reward-key", metavar="KEY", help="Part of a reward that is a mapping to call `reward`.")
    parser.add_argument("--tokens", action="store_true", help="With ids, loss mask and log-probs of the response.")
    options = parser.parse_args()
    target = Path(options.output)
    if target.suffix != ".parquet":
        raise ConfigError(f"--output {target} must end in .parquet.")
    num_rows = write(options.dumps, target, reward_key=options.reward_key, with_tokens=options.tokens)
    print(f"{num_rows} samples of {len(options.dumps)} dumps -> {target}")


def write(dumps: list[str], target: Path, *, reward_key: str | None, with_tokens: bool) -> int:
    """Write the table whole or not at all. Returns its number of rows."""
    import pyarrow as pa
    from pyarrow import parquet

    from slime.data.dump_file import read_samples

    rows: list[dict[str, Any]] = []
    for dump in dumps:
        for sample in read_samples("FILE", Path(dump)):
            rows.append(
                {"dump": Path(dump).name}
                | dict(_columns(sample, reward_key))
                | (_tokens(sample) if with_tokens else {})
            )
    names = dict.fromkeys(name for row in rows for name in row)  # a sample may lack parts that others have
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    with replacing(target) as partial:
        parquet.write_table(table, partial, compression="zstd")
    return len(rows)


def _columns(sample: Sample, reward_key: str | None) -> Iterator[tuple[str, Any]]:
    yield "group_index", sample.group_index
    yield "index", sample.index
    yield "prompt", sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt)
    yield "response", sample.response
    # A column has one type: labels may be numbers in one dump and text in another.
    yield "label", None if sample.label is None else str(sample.label)
    yield "status", sample.status.value
    yield "total_length", len(sample.tokens)
    yield "response_length", sample.response_length
    yield "trained_tokens", sample.response_length if sample.loss_mask is None else sum(sample.loss_mask)
    yield "weight_versions", [str(version) for version in sample.weight_versions]
    yield "metadata", json.dumps(sample.metadata, default=str)
    yield from _rewards(sample.reward, reward_key)


def _rewards(reward: Any, reward_key: str | None) -> Iterator[tuple[str, Any]]:
    if not isinstance(reward, dict):
        yield "reward", None if reward is None else float(reward)
        return
    for part, value in reward.items():
        number = float(value) if isinstance(value, int | float) else None
        yield f"reward_{part}", number if number is not None else json.dumps(value, default=str)
    # Without this part the column is null: parts have no common unit to sum.
    main_part = reward.get(reward_key or "score")
    yield "reward", float(main_part) if isinstance(main_part, int | float) else None


def _tokens(sample: Sample) -> dict[str, Any]:
    log_probs = sample.rollout_log_probs
    return {
        # Dumps may hold tensors or numpy numbers. Arrow needs plain ones.
        "tokens": list(map(int, sample.tokens)),
        "loss_mask": None if sample.loss_mask is None else list(map(int, sample.loss_mask)),
        "rollout_log_probs": None if log_probs is None else list(map(float, log_probs)),
    }


if __name__ == "__main__":
    try:
        main()
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
