"""Flags about the command line itself, read by the parser and by ``train.py``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CommandArgs"]


@dataclass(frozen=True)
class CommandArgs:
    """Command line."""

    custom_config_path: str | None = field(
        default=None,
        metadata={
            "metavar": "FILE",
            "help": "YAML mapping of argument names to values. Explicit flags win; other keys become attributes.",
        },
    )
    strict_args: bool = field(
        default=False,
        metadata={"help": "Warnings about the command line (unknown flags, guessed values) become errors."},
    )
    plan: bool = field(
        default=False, metadata={"help": "Print what this command would do, and stop: needs no GPU, Ray or torch."}
    )
