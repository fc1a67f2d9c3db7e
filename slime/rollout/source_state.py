"""State files of data sources and of the journal: written completely or not at all.

They are JSON, unless samples hold tensors or have more than ``_MANY_TOKENS`` tokens. Then lists of numbers are packed
into tensors, which take 9 to 13 bytes per token instead of 30.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.data.media import media_from_state, media_to_state
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.utils.errors import DataError
from slime.utils.files import replacing

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
