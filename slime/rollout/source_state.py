"""The files that hold where a data source is: written whole or not at all, JSON unless a sample holds tensors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from slime.data.media import media_from_state, media_to_state
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.utils.errors import DataError
from slime.utils.files import replacing

__all__ = [
    "FIX",
    "group_from_dicts",
    "group_to_dicts",
    "load_groups",
    "outstanding_path",
    "read_state",
    "save_groups",
    "state_path",
    "write_state",
]


FIX = "delete it to start from the first prompt"


def state_path(directory: str, rollout_id: int | None) -> Path:
    """State of the data source after a rollout, without its suffix: ``.json`` or ``.pt``."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}"


def outstanding_path(directory: str, rollout_id: int | None) -> Path:
    """Prompts that were under way at that moment, without its suffix."""
    return Path(directory) / "rollout" / f"outstanding_{rollout_id}"


def group_to_dicts(group: SampleGroup) -> list[Any]:
    return [_to_dict(item) if isinstance(item, Sample) else group_to_dicts(list(item)) for item in group]


def group_from_dicts(group: list[Any]) -> SampleGroup:
    return [
        _from_dict(item) if isinstance(item, dict) else list(iter_samples(group_from_dicts(item))) for item in group
    ]


def _to_dict(sample: Sample) -> dict[str, Any]:
    return sample.to_dict() | {"multimodal_inputs": media_to_state(sample.multimodal_inputs)}


def _from_dict(values: dict[str, Any]) -> Sample:
    return Sample.from_dict(values | {"multimodal_inputs": media_from_state(values.get("multimodal_inputs"))})


def save_groups(path: Path, groups: list[SampleGroup]) -> None:
    """Write groups; none leaves no file."""
    if groups:
        write_state(path, {"groups": [group_to_dicts(group) for group in groups]})
    else:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.with_suffix(".pt").unlink(missing_ok=True)


def load_groups(path: Path) -> list[SampleGroup]:
    """What :func:`save_groups` wrote."""
    state = read_state(path) or {"groups": []}
    return [group_from_dicts(group) for group in state["groups"]]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``path.json``, or ``path.pt`` where JSON would change the values."""
    try:
        text: str | None = json.dumps(state)
        if json.loads(text or "") != state:
            text = None  # JSON turns tuples into lists and number keys into text
    except (TypeError, ValueError):
        text = None
    target, other = path.with_suffix(".json"), path.with_suffix(".pt")
    if text is None:
        target, other = other, target
    with replacing(target) as partial:
        if text is not None:
            partial.write_text(text, encoding="utf-8")
        else:
            import torch

            torch.save(state, partial)
    other.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """What :func:`write_state` wrote, None where there is nothing.

    Raises:
        DataError: a file that is damaged.
    """
    as_json, as_torch = path.with_suffix(".json"), path.with_suffix(".pt")
    if as_json.is_file():
        try:
            state: dict[str, Any] = json.loads(as_json.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{as_json}: not valid JSON: {error}; {FIX}") from None
        return state
    if as_torch.is_file():
        import torch

        try:
            return dict(torch.load(as_torch, weights_only=True))
        except (EOFError, RuntimeError, ValueError, TypeError, pickle.UnpicklingError) as error:
            raise DataError(f"{as_torch}: damaged ({type(error).__name__}); {FIX}") from error
    return None
