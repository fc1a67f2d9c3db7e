"""Rollouts on disk: dumped as they were, and trained on again without engines.

A file holds ``{"rollout_id": int, "samples": [Sample.to_dict(), ...]}`` in torch's format.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.data.sample import Sample
from slime.utils.errors import DataError

__all__ = ["load_debug_rollout_data", "save_debug_rollout_data"]


def save_debug_rollout_data(
    template: str | None, samples: Sequence[Sample], *, rollout_id: int, evaluation: bool
) -> None:
    """Write ``samples`` to ``template`` with ``{rollout_id}`` filled in; evaluations as ``eval_<id>``."""
    if template is None:
        return
    path = Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, file)
    os.replace(file.name, path)


def load_debug_rollout_data(
    template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """The samples of a dump, only the first and last part of them with ``subsample_ratio``."""
    path = Path(template.format(rollout_id=rollout_id))
    if not path.is_file():
        raise DataError(f"--load-debug-rollout-data {template}: there is no file {path}.")
    try:
        content = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(f"--load-debug-rollout-data: {path} holds more than plain values and tensors: {error}") from None
    samples = [Sample.from_dict(item) for item in content["samples"]]
    if subsample_ratio is not None:
        half = int(len(samples) * subsample_ratio) // 2
        samples = samples[:half] + samples[len(samples) - half :]
    return samples
