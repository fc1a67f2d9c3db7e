"""Paths that cannot be written, replayed or meant."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.config import notices
from slime.config.groups import flag_of
from slime.config.path_flags import PATH_FLAGS

__all__ = ["RULES"]


def _empty(args: Namespace) -> Iterator[str]:
    """The empty path is the working directory to the operating system, and an unset variable to the user."""
    for flag in PATH_FLAGS:
        if getattr(args, flag.name) == "":
            yield f"{flag_of(flag.name)} is empty: leave it out, or set the variable that the launch script puts there."


def _outputs(args: Namespace) -> Iterator[str]:
    for name in (flag.name for flag in PATH_FLAGS if flag.is_directory and flag.does != "reads"):
        value = getattr(args, name)
        if not value:
            continue
        directories = [path for path in (Path(value), *Path(value).parents) if "{" not in path.name]
        if file := next((path for path in directories if path.is_file()), None):
            yield f"{flag_of(name)} {value}: {file} is a file, but this is to be a directory. Give another name."


def _templates(args: Namespace) -> Iterator[str]:
    for name, fields in ((flag.name, flag.fields) for flag in PATH_FLAGS):
        template = getattr(args, name)
        if not template or not fields:
            continue
        try:
            texts = {template.format(**dict.fromkeys(fields, number)) for number in (1, 2)}
        except (KeyError, IndexError, ValueError):
            known = " and ".join(f"{{{field}}}" for field in fields)
            yield f"{flag_of(name)} {template}: only {known} can be replaced; write other braces twice."
            continue
        is_once = name == "save_hf" and args.save_interval is None
        if len(texts) == 1 and name.startswith("save") and not is_once:
            what = "export" if name == "save_hf" else "rollout"
            text = f"{template} has no {{rollout_id}}: every {what} replaces the one before"
            notices.warn(args, flag_of(name), text)


def _replayed(args: Namespace) -> Iterator[str]:
    """The first dump that a run will ask for; a resumed run starts at a later one, which only its checkpoint knows."""
    template = args.load_debug_rollout_data
    if not template or (args.load is not None and args.start_rollout_id is None and "{" in template):
        return
    try:
        path = Path(template.format(rollout_id=args.start_rollout_id or 0))
    except (KeyError, IndexError, ValueError):
        return  # told above
    if not path.is_file():
        yield f"--load-debug-rollout-data {template}: there is no file {path}, with which the run would begin."


RULES = (_empty, _outputs, _templates, _replayed)
