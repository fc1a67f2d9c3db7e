"""State files of data sources: written completely or not at all, as JSON unless a sample holds tensors."""

from __future__ import annotations

import hashlib
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.data.media import media_from_state, media_to_state
from slime.data.prompts import parse_path
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
    """Write groups. Without groups the file is deleted."""
    if groups:
        write_state(path, {"groups": [group_to_dicts(group) for group in groups]})
    else:
        # A file of an earlier save would return the same prompts again.
        path.with_suffix(".json").unlink(missing_ok=True)
        path.with_suffix(".pt").unlink(missing_ok=True)


def load_groups(path: Path) -> list[SampleGroup]:
    """Read the groups of :func:`save_groups`."""
    state = read_state(path) or {"groups": []}
    return [group_from_dicts(group) for group in state["groups"]]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``path.json``, or ``path.pt`` if JSON would change the values."""
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
    # A file of an earlier save with the other suffix could be read instead of this one.
    other.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """Read the file of :func:`write_state`. Returns None if it does not exist.

    Raises:
        DataError: a damaged file.
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


# The order of prompts: its fingerprint is kept in the data state, and compared when a run is resumed.
#
# Called by the data source. A position (epoch, row) means the same prompt only if the file and these settings are the
# same. The digest covers the whole file up to 64 MiB. Of a larger file it covers 64 blocks of 1 MiB at equal distances,
# with the first and the last block: an edit between the blocks that keeps the size is not noticed. The cost is to read
# at most 64 MiB, once per start.

_BLOCK = 1024**2
_NUM_BLOCKS = 64
_ORDER = ("streaming_data", "rollout_shuffle", "n_samples_per_prompt")
_OTHER = ("seed", "rollout_seed", "input_key", "label_key", "apply_chat_template", "rollout_max_prompt_len")


def fingerprint(args: Namespace, num_prompts: int | None) -> dict[str, Any]:
    """Fingerprint of ``--prompt-data`` and of the flags that decide the order, as JSON values.

    Args:
        num_prompts: in one epoch, without those that are too long. None for a stream.
    """
    path, part = parse_path(args.prompt_data)
    bounds = None if part is None else [part.start, part.stop]
    flags = {name: getattr(args, name, None) for name in (*_ORDER, *_OTHER)}
    return {"size": Path(path).stat().st_size, "digest": _digest(Path(path)), "slice": bounds} | {
        "prompts": num_prompts,
        "flags": flags,
    }


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Differences between ``old`` and ``new``: those that change the order of prompts, and the others."""
    order: list[str] = []
    other: list[str] = []
    if (old.get("size"), old.get("digest")) != (new["size"], new["digest"]):
        order.append(f"the content of --prompt-data (it had {old.get('size')} bytes, now it has {new['size']})")
    if old.get("slice") != new["slice"]:
        order.append(f"the slice of --prompt-data (it was {old.get('slice')}, now it is {new['slice']})")
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


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    step = (size - _BLOCK) / (_NUM_BLOCKS - 1)
    is_small = size <= _NUM_BLOCKS * _BLOCK
    starts = range(0, size, _BLOCK) if is_small else (int(step * i) for i in range(_NUM_BLOCKS))
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
