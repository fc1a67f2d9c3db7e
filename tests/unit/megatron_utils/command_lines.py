"""Command lines for a checkpoint that consists of its config.json: parsed by the real parser, derived, checked."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils import arguments
from slime.backends.megatron_utils.argument_rules import RULES, STEPS
from slime.config.groups import groups_in
from slime.config.parse import EngineNamespace, parse


@dataclass(frozen=True)
class _FromOtherRooms:
    """The flags of other rooms that the rules of this room read."""

    hf_checkpoint: str | None = None
    debug_rollout_only: bool = False


_GROUPS = [_FromOtherRooms, *groups_in(arguments)]


def write_config(directory: Path, config: dict[str, Any]) -> str:
    """The Hugging Face directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def read_flags(hf_checkpoint: str, words: list[str], *, world_size: int = 1) -> Namespace:
    """Arguments as the trainer's own steps find them."""
    args = parse(
        ["--hf-checkpoint", hf_checkpoint, *words],
        _GROUPS,
        read_engine=lambda argv, known: EngineNamespace(rest=list(argv)),
    )
    args.world_size = world_size
    return args


def resolved(hf_checkpoint: str, words: list[str], *, world_size: int = 1) -> Namespace:
    args = read_flags(hf_checkpoint, words, world_size=world_size)
    for step in STEPS:
        step(args)
    return args


def problems_of(hf_checkpoint: str, words: list[str], *, world_size: int = 1) -> list[str]:
    args = resolved(hf_checkpoint, words, world_size=world_size)
    return [problem for rule in RULES for problem in rule(args)]
