"""Paths that cannot be written, replayed or meant."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from slime.algorithms.arguments import needs_reference
from slime.config import groups
from slime.config.groups import flag_of
from slime.config.resolve.paths import PATH_FLAGS, UsedPath, used_paths


def _empty(args: Namespace) -> Iterator[str]:
    """The empty path is the working directory to the operating system, and an unset variable to the user."""
    for flag in PATH_FLAGS:
        if vars(args)[flag.name] == "":
            yield f"{flag_of(flag.name)} is empty: leave it out, or set the variable that the launch script puts there."


def _outputs(args: Namespace) -> Iterator[str]:
    for name in (flag.name for flag in PATH_FLAGS if flag.is_directory and flag.does != "reads"):
        value = vars(args)[name]
        if not value:
            continue
        # A directory whose name has a field does not exist yet.
        directories = [path for path in (Path(value), *Path(value).parents) if "{" not in path.name]
        if file := next((path for path in directories if path.is_file()), None):
            yield f"{flag_of(name)} {value}: {file} is a file, but this is to be a directory. Give another name."


def _templates(args: Namespace) -> Iterator[str]:
    for name, fields in ((flag.name, flag.fields) for flag in PATH_FLAGS):
        template = vars(args)[name]
        if not template or not fields:
            continue
        try:
            texts = {template.format(**dict.fromkeys(fields, number)) for number in (1, 2)}
        except (KeyError, IndexError, ValueError):
            known = " and ".join(f"{{{field}}}" for field in fields)
            yield f"{flag_of(name)} {template}: only {known} can be replaced; write other braces twice."
            continue
        # An export without an interval is written once, at the end.
        is_once = name == "save_hf" and args.save_interval is None
        if len(texts) == 1 and name.startswith("save") and not is_once:
            what = "export" if name == "save_hf" else "rollout"
            text = f"{template} has no {{rollout_id}}: every {what} replaces the one before"
            groups.warn(args, flag_of(name), text)


def _replayed(args: Namespace) -> Iterator[str]:
    """The first dump of the run must exist. A resumed run starts at a later one, which only its checkpoint knows."""
    template = args.load_debug_rollout_data
    if not template or (args.load is not None and args.start_rollout_id is None and "{" in template):
        return
    try:
        path = Path(template.format(rollout_id=args.start_rollout_id or 0))
    except (KeyError, IndexError, ValueError):
        return  # reported by ``_templates``
    if not path.is_file():
        yield f"--load-debug-rollout-data {template}: there is no file {path}, with which the run would begin."


RULES = (_empty, _outputs, _templates, _replayed)


# Checkpoint directories: what must exist, and how often to write.


def _checkpoint_directories(args: Namespace) -> Iterator[str]:
    has_reference = needs_reference(args)
    cause = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
    if has_reference and args.ref_load is None and args.hf_checkpoint is not None:
        yield f"{cause} needs a reference model: give --ref-load DIR."
    # A missing --hf-checkpoint is one problem, also if it is the reference.
    is_other = args.ref_load is not None and args.ref_load != args.hf_checkpoint
    if has_reference and is_other and not Path(args.ref_load).is_dir():
        yield f"--ref-load {args.ref_load}: there is no such directory, and {cause} needs a reference model."
    for flag, path in (
        ("--opd-teacher-load", args.opd_teacher_load),
        ("--initial-megatron-checkpoint", args.initial_megatron_checkpoint),
    ):
        if path is not None and not Path(path).is_dir():
            yield f"{flag} {path}: there is no such directory."


def _saving(args: Namespace) -> Iterator[str]:
    if args.save is not None and args.save_interval is None and args.num_rollout != 0:
        yield "--save needs --save-interval N: how often to write a checkpoint (the last rollout is always saved)."


CHECKPOINT_RULES = (_checkpoint_directories, _saving)


# No path that a run writes lies on one that it reads or writes as well: one rule over all pairs of paths.

_FIELD = re.compile(r"\{[^{}]*\}")
_ANY_FIELD = r"(?:eval_)?\d+"
# ``torch.save`` writes a zip file, which begins with these bytes.
_DUMP_BEGINS = b"PK"
# The more harmful use of a pair is its writer.
_HARM = ("replaces", "adds", "reads")


def _overlaps(args: Namespace) -> Iterator[str]:
    for pair in combinations(used_paths(args), 2):
        writer, other = sorted(pair, key=lambda used: _HARM.index(used.flag.does))
        if (reason := _conflict(writer, other) or _conflict(other, writer)) is not None:
            yield reason


def _conflict(writer: UsedPath, other: UsedPath) -> str | None:
    """The reason why ``writer`` must not write to the place of ``other``, or None."""
    # --load and --save may be equal: a resumed run continues its directory.
    if writer.flag.does == "reads" or {writer.flag.name, other.flag.name} == {"load", "save"}:
        return None
    relation = _relation(writer.path, other.path)
    if relation == "equal":
        if writer.flag.does == "adds" and other.flag.does == "adds":
            return None
        if writer.flag.does == "adds" and writer.flag.name != "save" and other.flag.is_directory:
            return None
        kind = "directory" if writer.flag.is_directory else "file"
        return f"{writer} and {other} are the same {kind}: {_harm(writer)}. Name two."
    if relation == "holds" and writer.flag.does == "replaces":
        return f"{writer} contains {other}: {_harm(writer)}. Name a path that holds nothing else."
    if relation == "holds" and not writer.flag.is_directory:
        return f"{writer} is to be a file, but {other} lies in it. Name another path."
    return None


def _harm(writer: UsedPath) -> str:
    if writer.flag.does == "adds":
        return "this run's checkpoints would take the place of what is read there"
    return f"it is replaced by {writer.flag.what}"


def _relation(one: str, other: str) -> str | None:
    """``equal`` if some values of the fields make them the same path, ``holds`` if the second lies below the first."""
    first, second = Path(one).parts, Path(other).parts
    if len(first) > len(second) or not all(map(_can_be_same, first, second)):
        return None
    return "equal" if len(first) == len(second) else "holds"


def _can_be_same(one: str, other: str) -> bool:
    if _FIELD.search(one) and _FIELD.search(other):  # a run puts the same numbers into all
        return _FIELD.sub("0", one) == _FIELD.sub("0", other)
    if _FIELD.search(other):
        # From here on ``one`` is the path with a field.
        one, other = other, one
    if not _FIELD.search(one):
        return one == other
    pattern = _ANY_FIELD.join(re.escape(part) for part in _FIELD.split(one))
    return re.fullmatch(pattern, other) is not None


def _replaced_files(args: Namespace) -> Iterator[str]:
    """A dump replaces a dump, and no other file of the user."""
    for used in used_paths(args):
        if used.flag.does != "replaces" or used.flag.is_directory:
            continue
        path = Path(used.path)
        if not path.parent.is_dir():
            continue
        for entry in path.parent.iterdir():
            if _can_be_same(path.name, entry.name) and entry.is_file() and not _is_dump(entry):
                yield f"{used}: {entry} is there and is no dump of a run; it would be replaced. Name another path."


def _is_dump(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_DUMP_BEGINS)) == _DUMP_BEGINS
    except OSError:
        return False


OVERLAP_RULES = (_overlaps, _replaced_files)
