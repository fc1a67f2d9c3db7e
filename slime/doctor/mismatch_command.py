"""The command ``slime doctor mismatch``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from slime.observability.run_info import FILE, read_run_info

_NO_REFEREE = "none (--hf-checkpoint DIR names the weights that generated the rollout)"


def mismatch(words: Sequence[str]) -> int:
    """Print the cause of the difference between trainer and engine.

    Returns:
        0 if they agree or differ by rounding only, 1 if there is a cause to repair.

    Raises:
        DataError: the input cannot be read.
    """
    options = _parse(words)
    # These import torch, which takes seconds: wrong options are reported before.
    from slime.doctor.mismatch import diagnose
    from slime.doctor.mismatch_input import Referee, read_rows_of

    rows = read_rows_of(options.dump, options.rollout, options.num_samples)
    versions = {int(version) for row in rows for version in row.versions if version.isdecimal()}
    checkpoint, temperature = _settings(options, max(versions, default=0))
    referee = None if checkpoint is None else Referee.load(checkpoint)
    other = None if options.other_checkpoint is None else Referee.load(options.other_checkpoint)
    verdict = diagnose(rows, referee, temperature=temperature, other=other)
    if options.json:
        print(json.dumps(asdict(verdict) | {"num_samples": len(rows)}, indent=2))
    else:
        print(f"{verdict.cause}: {verdict.sentence}\n")
        print(f"  {'samples':<48} {len(rows)}\n  {'referee':<48} {checkpoint or _NO_REFEREE}")
        for name, value in verdict.evidence.items():
            print(f"  {name:<48} {value:.3g}")
    return 0 if verdict.cause in ("none", "precision") else 1


def _parse(words: Sequence[str]) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="slime doctor mismatch",
        description="Find out why the log-probs of trainer and engine differ: weights, tokens, mask, temperature, "
        "top-p, routing or precision. Prints one sentence and its figures.",
    )
    parser.add_argument("dump", type=Path, help="folder of a run, or a file of --save-debug-train-data")
    parser.add_argument("--rollout", type=int, help="of a run's folder; default: the last one that was trained on")
    parser.add_argument(
        "--hf-checkpoint",
        metavar="DIR",
        help="the weights that generated the rollout, for the referee. Default: --save-hf of the rollout before if the "
        "run wrote it, or the model of the run for weights of version 0. 'none' goes without a referee",
    )
    parser.add_argument("--other-checkpoint", metavar="DIR", help="weights that the engine may have held instead")
    parser.add_argument("--temperature", type=float, help="default: --rollout-temperature of the run, else 1")
    parser.add_argument("--num-samples", type=_count, default=16, help="most samples to look at, default %(default)s")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(list(words))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _settings(options: Namespace, version: int) -> tuple[str | None, float]:
    """(checkpoint of the referee, temperature): from the options, else from the run.

    Args:
        version: weights that generated the samples: the number of rollouts they were trained on.
    """
    checkpoint, temperature = options.hf_checkpoint, options.temperature
    if options.dump.is_dir() and (options.dump / FILE).is_file():
        info = read_run_info(options.dump)
        template = info.settings.get("save_hf") or ""
        is_kept = "{rollout_id" in template  # else a later rollout has overwritten it
        # Weights of version n are saved after rollout n - 1.
        saved = info.resolved(template.format(rollout_id=version - 1)) if is_kept and version else None
        is_saved = saved is not None and (Path(saved) / "config.json").is_file()
        # Other weights would be reported as a mismatch, so without an export of this version there is no referee.
        exact = saved if is_saved else None if version else info.resolved(info.hf_checkpoint)
        checkpoint = checkpoint or exact
        temperature = temperature or info.settings.get("rollout_temperature")
    return (None if checkpoint == "none" else checkpoint), temperature or 1.0
