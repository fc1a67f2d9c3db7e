"""What decides which prompt is drawn at which position: kept in the data state, compared when a run is resumed.

Called by the data source. A position (epoch, row) means the same prompt only if the file and these settings are the
same. The digest covers the whole file up to 64 MiB. Of a larger file it covers 64 blocks of 1 MiB at equal distances,
with the first and the last block: an edit between the blocks that keeps the size is not noticed. The cost is to read
at most 64 MiB, once per start.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.data.prompts import parse_path

__all__ = ["changes", "fingerprint"]

_BLOCK = 1024**2
_NUM_BLOCKS = 64
_ORDER = ("streaming_data", "rollout_shuffle", "n_samples_per_prompt")
_OTHER = ("seed", "rollout_seed", "input_key", "label_key", "apply_chat_template", "rollout_max_prompt_len")


def fingerprint(args: Namespace, num_prompts: int | None) -> dict[str, Any]:
    """Of ``--prompt-data`` and the flags that decide the order; JSON values.

    Args:
        num_prompts: in one epoch, without those that are too long; None for a stream.
    """
    path, part = parse_path(args.prompt_data)
    bounds = None if part is None else [part.start, part.stop]
    flags = {name: getattr(args, name, None) for name in (*_ORDER, *_OTHER)}
    return {"size": Path(path).stat().st_size, "digest": _digest(Path(path)), "slice": bounds} | {
        "prompts": num_prompts,
        "flags": flags,
    }


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """How ``new`` differs from ``old``: what changes which prompt comes next, and what does not."""
    order: list[str] = []
    other: list[str] = []
    if (old.get("size"), old.get("digest")) != (new["size"], new["digest"]):
        order.append(f"the content of --prompt-data (it had {old.get('size')} bytes, now it has {new['size']})")
    if old.get("slice") != new["slice"]:
        order.append(f"the slice of --prompt-data (it was {old.get('slice')}, now it is {new['slice']})")
    if not order and old.get("prompts") != new["prompts"] and None not in (old.get("prompts"), new["prompts"]):
        order.append(f"the number of usable prompts (it was {old.get('prompts')}, now it is {new['prompts']})")
    before, now = old.get("flags", {}), new["flags"]
    for name in now:
        if name in before and before[name] != now[name]:
            text = f"--{name.replace('_', '-')} (it was {before[name]}, now it is {now[name]})"
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
