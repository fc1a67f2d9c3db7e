"""The command ``slime`` (also ``python -m slime``): ``COMMANDS`` lists its commands, ``slime --help`` prints them.

A train command, which some commands take, is the last line of a launch script: ``python train.py --flag ...``,
``slime train --flag ...``, or its flags alone. Nothing here imports torch, Ray, Megatron or SGLang; the doctor does,
check by check.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import select
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any

from slime.config.parse import HINT, HelpFormatter, terminal_width
from slime.utils.errors import SlimeError
from slime.utils.misc import as_float

DEVICE_MEMORY_GIB = 80.0
_MOST_GIB = 1e6
# Driver -> whether it is asynchronous.
_DRIVERS = {"train.py": False, "train_async.py": True}
_DRIVER_COMMANDS = {"train": False, "train-async": True}
_COLUMN = 18


class UsageError(SlimeError):
    """The words after ``slime`` are not a command. The text is the reason."""


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: the words after ``slime``.
        run: ``module:function``, imported when the command is used. It takes the other words and returns the status.
    """

    group: str
    name: str
    run: str
    summary: str


_HERE, _ENV = "slime.cli", "slime.doctor.environment_command"

COMMANDS = (
    Command("Run", "train", "slime.ray.run.main:main", "generate, train, send the new weights, and again"),
    Command("Run", "train-async", "slime.ray.run.main:main_async", "the same, and generate while the trainer works"),
    Command("Before a run", "new", "slime.new:new", "write the folder of a task that runs, to change it"),
    Command("Before a run", "tasks", f"{_ENV}:tasks", "write tasks of an environment as prompt data"),
    Command("Before a run", "plan", f"{_HERE}:plan", "print batches, processes, memory and files of a train command"),
    Command("Before a run", "doctor", f"{_HERE}:_doctor", "check this machine, and whether it can run a train command"),
    Command("Before a run", "doctor env", f"{_ENV}:env", "test an environment and its grader"),
    Command("Before a run", "doctor --gpu", "slime.doctor.gpu_check:gpu_check", "measure this GPU before a long job"),
    Command(
        "Before a run",
        "doctor engine",
        "slime.doctor.engine_command:engine",
        "compare an engine, such as that of the next SGLang, with transformers",
    ),
    Command("During and after a run", "board", "slime.board:board", "show curves, times and samples in a browser"),
    Command(
        "During and after a run",
        "replay",
        "slime.replay:replay",
        "generate, score and train again: on one recorded sample, or the whole run",
    ),
    Command(
        "During and after a run",
        "branch",
        "slime.replay.history:branch",
        "continue a recorded run with other flags, and name the first difference",
    ),
    Command(
        "During and after a run",
        "doctor mismatch",
        "slime.doctor.mismatch_command:mismatch",
        "find out why log-probs of trainer and engine differ",
    ),
    Command(
        "During and after a run",
        "doctor ledger",
        f"{_HERE}:_doctor_ledger",
        "find prompts that were lost or trained on twice",
    ),
    Command("During and after a run", "clean", "slime.utils.files:clean", "delete temporary folders of ended runs"),
)


@dataclass(frozen=True)
class TrainCommand:
    """The arguments of a driver, found in a longer command line."""

    argv: list[str]
    is_async: bool


@contextmanager
def quiet_if_unread() -> Iterator[None]:
    """End with status 1, as Python and rich do, if the reader of standard output has ended.

    Characters that an output cannot encode, as in a C locale, are escaped: they end no run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        unread = select.poll()
        unread.register(1, 0)
        if not unread.poll(0):  # the error is about another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at its end
        raise SystemExit(1) from None


@quiet_if_unread()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``slime <command>``. Returns the exit status: 2, with the message, for errors that explain themselves."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("help", "-h", "--help"):
        print(help_text())
        return 0
    if words == ["--version"]:
        from importlib.metadata import version

        print(version("slime"))
        return 0
    try:
        command, rest = _find(words)
        # Imported here: each command must start without the modules of the others.
        return int(resolve_name(command.run)(rest) or 0)
    except (SlimeError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _find(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that ``words`` begin with, and the other words.

    Raises:
        UsageError: there is none.
    """
    by_name = {command.name: command for command in COMMANDS}
    pair = " ".join(words[:2])
    names = [name for name in by_name if " " in name and not pair.startswith(f"{words[0]} -")]
    near = difflib.get_close_matches(pair, names, n=1, cutoff=0.85)
    if near and near[0] != pair:
        raise UsageError(f"{pair!r} is not a command of slime; {HINT} {near[0]}?")
    for length in (2, 1):
        if command := by_name.get(" ".join(words[:length])):
            return command, list(words[length:])
    near = difflib.get_close_matches(words[0], by_name, n=1)
    hint = f"{HINT} {near[0]}?" if near else "slime --help lists all."
    raise UsageError(f"{words[0]!r} is not a command of slime; {hint}")


def help_text() -> str:
    """The text of ``slime --help``."""
    lines = ["Reinforcement learning for language models.", "", "Usage: slime <command> ..."]
    for group, commands in groupby(COMMANDS, key=lambda command: command.group):
        lines += ["", f"{group}:", *_rows((command.name, command.summary) for command in commands)]
    more = (("-h, --help", "print this text; slime <command> --help describes one command"), ("--version", "print it"))
    return "\n".join([*lines, "", "Options:", *_rows(more)])


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Two columns at the width of the terminal."""
    known = list(rows)
    column = max(_COLUMN, *(len(name) + 2 for name, _ in known))
    for name, text in known:
        first, *more = textwrap.wrap(text, max(20, terminal_width() - column - 2))
        yield f"  {name:<{column}}{first}"
        yield from (" " * (column + 2) + line for line in more)


def _parser(name: str, takes: str) -> argparse.ArgumentParser:
    """The parser of a command's own options. With a train command they may be anywhere in it."""
    summary = next(command.summary for command in COMMANDS if command.name == name)
    about = "A train command is python train.py --flag ..., slime train --flag ..., or the flags alone."
    return argparse.ArgumentParser(
        prog=f"slime {name}",
        usage=f"%(prog)s {takes}",
        description=f"{summary[0].upper()}{summary[1:]}." + (f" {about}" if "<train command>" in takes else ""),
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )


def _gib(text: str) -> float:
    number = as_float(text)
    if number is None or not 0 < number < _MOST_GIB:  # false for NaN
        raise argparse.ArgumentTypeError(f"{text}: give the memory in GiB, such as {DEVICE_MEMORY_GIB:g}.")
    return number


def _unique_in_dump(template: str | None) -> float | None:
    """Share of the tokens of a dump that pass the trainer with --share-prefixes. Imports torch if there is a dump."""
    if template is None:
        return None
    from slime.batch.prefixes import prefix_tree
    from slime.data.dump_file import load_debug_rollout_data
    from slime.utils.errors import SlimeError

    try:
        samples = load_debug_rollout_data(template, rollout_id=0)
    except SlimeError:  # the checks of the command report it
        return None
    columns: dict[str, list[Any]] = {"tokens": [sample.tokens for sample in samples]}
    columns["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if all(sample.rollout_routed_experts is not None for sample in samples):
        columns["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    tree = prefix_tree(columns)
    return None if tree is None else tree.unique_share


def plan(words: Sequence[str]) -> int:
    """``slime plan``, and ``train.py --plan``.

    Returns:
        0 if the command would start, else 2. The plan is printed in both cases.
    """
    from slime.config.plan import build
    from slime.config.plan.devices import colocation_problems

    parser = _parser("plan", "[option ...] <train command>")
    parser.add_argument(
        "--device-memory-gb",
        type=_gib,
        metavar="N",
        help="memory of one GPU in GiB. Default: that of this machine's GPU",
    )
    parser.add_argument("--host-memory-gb", type=_gib, metavar="N", help="memory of one node in GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)  # of train.py
    options, words = parser.parse_known_args(words)
    memory_gib = options.device_memory_gb
    if not words:
        raise UsageError("slime plan needs a train command, or its flags; slime plan --help describes them.")
    command = read_command(words)
    resolved = _resolve(command)
    args = resolved.args
    if args is None:
        return _refuse(resolved.problems, options.json)
    title = PurePath(str(args.hf_checkpoint)).name if args.hf_checkpoint else "no checkpoint"
    driver = "train_async.py" if command.is_async else "train.py"
    has_others = args.actor_num_nodes > 1 or "num_layers" in args.given
    is_cpu, device_bytes, host_bytes = _judged_for(memory_gib, options.host_memory_gb, is_about_others=has_others)
    result = build(
        args,
        title=f"{driver} · {title}",
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        is_cpu=is_cpu,
        ignored=resolved.ignored,
        # A rule of this machine knows its devices.
        problems=[*resolved.problems, *colocation_problems(args, device_bytes if memory_gib else 0)],
        missing=resolved.missing,
        unique_in_dump=_unique_in_dump(args.load_debug_rollout_data),
    )
    if options.json:
        print(json.dumps(result.as_dict(), indent=2, ensure_ascii=False, default=str))
    else:
        from slime.config.plan.render import render

        render(result)
    return 0 if result.is_startable else 2


def _judged_for(device_gib: float | None, host_gib: float | None, *, is_about_others: bool) -> tuple[bool, int, int]:
    """Whether the run is planned for this machine's CPU, and the memory in bytes of a device and of a node.

    On a machine without GPUs it is, unless the command is about others: the memory of their GPUs, more nodes, a running
    Ray cluster, or the shape of the model, which the presets of launch scripts give.
    """
    import psutil

    from slime.config.plan import HOST_GIB
    from slime.config.plan.devices import gpu_bytes
    from slime.utils import accelerator

    is_elsewhere = is_about_others or device_gib is not None or bool(os.environ.get("RAY_ADDRESS"))
    if accelerator.current().is_cpu and not is_elsewhere:
        return True, 0, round(host_gib * 2**30) if host_gib else psutil.virtual_memory().total
    device_gib = device_gib or gpu_bytes() / 2**30 or DEVICE_MEMORY_GIB
    return False, round(device_gib * 2**30), round((host_gib or HOST_GIB) * 2**30)


def _doctor(words: Sequence[str]) -> int:
    """``slime doctor``. Returns 1 if a check fails."""
    from slime.doctor import Situation, examine, exit_status, render, render_json
    from slime.doctor.command_checks import CHECKS

    parser = _parser("doctor", "[option ...] [<train command>]")
    parser.add_argument("--deep", action="store_true", help="also import the engines and compute on the device")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options, words = parser.parse_known_args(words)
    resolved = _resolve(read_command(words)) if words else _Resolved(None, [], [], [])
    findings = examine(Situation(resolved.args, (*resolved.problems, *resolved.missing), options.deep), CHECKS)
    (render_json if options.json else render)(findings)
    return exit_status(findings)


def _doctor_ledger(words: Sequence[str]) -> int:
    """``slime doctor ledger``."""
    from slime.data.ledger import examine_ledger

    parser = _parser("doctor ledger", "PATH")
    parser.add_argument("path", type=Path, help="folder of a run or of its checkpoints, or the ledger")
    return examine_ledger(parser.parse_args(words).path)


def read_command(words: Sequence[str]) -> TrainCommand:
    """Find the driver's arguments in ``[--] [ENV=x ...] [python3 ...] [train.py | slime train] --flag ...``.

    Raises:
        UsageError: words before the first flag that do not name a driver.
    """
    for index, word in enumerate(words):
        name = PurePath(word).name
        # only the name counts: the path, the interpreter and a launcher such as "ray job submit" come before it
        if name in _DRIVERS and not word.startswith("-"):
            return TrainCommand(list(words[index + 1 :]), _DRIVERS[name])
    for index, word in enumerate(words):  # slime train --flag ..., or train --flag ... alone
        if word in _DRIVER_COMMANDS and (index == 0 or PurePath(words[index - 1]).name == "slime"):
            return TrainCommand(list(words[index + 1 :]), _DRIVER_COMMANDS[word])
    # No driver: the words must be the flags alone. A leading "--" only separates them from the options of slime.
    flags = list(words[1:] if words and words[0] == "--" else words)
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"{flags[0]!r} is neither a flag nor a command with train.py, train_async.py, slime train or slime "
            "train-async in it."
        )
    return TrainCommand(flags, is_async=False)


@dataclass(frozen=True)
class _Resolved:
    """A command as far as it can be read: without ``args`` there are problems.

    Attributes:
        ignored: (flag, why) of flags that were given and have no effect.
        missing: requirements that this machine does not meet.
    """

    args: Namespace | None
    problems: list[str]
    ignored: list[tuple[str, str]]
    missing: list[str]


def _resolve(command: TrainCommand) -> _Resolved:
    from slime.config.groups import ignored_flags
    from slime.ray import arguments

    # without hooks: a plan must not import the user's code or ask external engines
    args, problems = arguments.parse_only(command.argv, is_async=command.is_async, loads_hooks=False)
    if args is None:
        return _Resolved(None, problems, [], [])
    return _Resolved(args, problems, list(ignored_flags(args, arguments.GROUPS)), arguments.machine_problems(args))


def _refuse(problems: Sequence[str], as_json: bool) -> int:
    """Report a command line that cannot be read, so that no plan exists."""
    if as_json:  # the keys of a plan: programs read both from the same pipe
        print(json.dumps({"schema": 1, "is_startable": False, "problems": list(problems)}, indent=2))
    else:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
    return 2
