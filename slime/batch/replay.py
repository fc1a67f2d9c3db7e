"""Dumps rollouts to disk after generation, and reads them in a later run that trains without engines.

A file is ``torch.save({"rollout_id": int, "samples": [Sample.to_dict(), ...]})``. Called in the rollout process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.data.chat import load_tokenizer
from slime.data.dump_file import dump_path, read_samples, write_dump
from slime.data.sample import Sample, iter_samples
from slime.utils.errors import ConfigError, DataError


def save_debug_rollout_data(path_template: str | None, data: Any, *, rollout_id: int, evaluation: bool) -> Path | None:
    """Write the samples of a rollout, or of an evaluation (``eval_<id>``). The file appears complete or not at all.

    Args:
        path_template: ``--save-debug-rollout-data``. None writes nothing.
        data: groups of samples, or the result of an evaluation (data set name -> ``{"samples": [...], ...}``).

    Returns:
        The file. None also if writing failed, which is logged.
    """
    if path_template is None:
        return None
    name = f"eval_{rollout_id}" if evaluation else str(rollout_id)
    path = dump_path("--save-debug-rollout-data", path_template, name)
    samples = [sample.to_dict() for sample in _samples_of(data)]
    content = {"rollout_id": rollout_id, "samples": samples}
    return path if write_dump("--save-debug-rollout-data", path, content) else None


def save_tokenizer(directory: str | None, hf_checkpoint: str) -> None:
    """Put the tokenizer beside the dumps (``<directory>/tokenizer``), so that no checkpoint is needed to read them."""
    if directory is not None:
        load_tokenizer(hf_checkpoint, trust_remote_code=True).save_pretrained(Path(directory) / "tokenizer")


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """Read a dump back.

    Args:
        path_template: ``--load-debug-rollout-data``. Without ``{rollout_id}`` the same file serves every rollout.
        subsample_ratio: ``--load-debug-rollout-data-subsample``. Keeps that fraction, half from either end.

    Raises:
        DataError: no such file, or not a dump. Names the flag and the file.
        ConfigError: a template or a fraction that cannot work.
    """
    flag = "--load-debug-rollout-data"
    samples = read_samples(flag, dump_path(flag, path_template, str(rollout_id)))
    if subsample_ratio is None:
        return samples
    if not 0 < subsample_ratio <= 1:
        raise ConfigError(f"--load-debug-rollout-data-subsample {subsample_ratio} must be above 0 and at most 1.")
    # at least one sample, however small the fraction
    keep = max(1, int(len(samples) * subsample_ratio))
    head = keep // 2
    return samples[:head] + samples[len(samples) - (keep - head) :]


def _samples_of(data: Any) -> Iterable[Sample]:
    # training: groups of samples. An evaluation is a mapping with one entry per data set.
    if not isinstance(data, Mapping):
        return iter_samples(data)
    found: list[Sample] = []
    for dataset, result in data.items():
        samples: Sequence[Any] | None = result.get("samples")
        if samples is None:
            raise DataError(f"evaluation of {dataset} returned no samples: --save-debug-rollout-data needs them")
        found.extend(iter_samples(samples))
    return found
