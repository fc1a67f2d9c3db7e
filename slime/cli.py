"""The command ``slime`` (also ``python -m slime``): plan a train command, examine this machine, replay and show runs.

    slime plan [--json] [--device-memory-gb N] [--host-memory-gb N] <train command>
    slime doctor [--deep] [<train command>]
    slime doctor --gpu [--only A,B] [--small] [--json]   measurements on this device before a long job
    slime doctor mismatch <run or dump>  why log-probs of trainer and engine differ
    slime replay <run> --rollout R --sample S   one recorded sample again, where breakpoint() works
    slime board <run>                    a web page over the run's files, live while it trains
    slime doctor ledger <folder of a run or its checkpoints>    was a prompt lost, or trained on twice?

A train command is the last line of a launch script: ``python train.py --flag ...``, or its flags alone. Nothing here
imports torch, Ray, Megatron or SGLang; the doctor does, check by check.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

DEVICE_MEMORY_GIB = 80.0
_MOST_GIB = 1e6
# Driver -> whether it is asynchronous.
_DRIVERS = {"train.py": False, "train_async.py": True}
_HELP = (__doc__ or "").split("\n\n", 1)[1]


class UsageError(Exception):
    """The words after ``slime`` are not a command. The text is the reason."""


@dataclass(frozen=True)
class TrainCommand:
    """The arguments of a driver, found in a longer command line."""

    argv: list[str]
    is_async: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``slime <command>``. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "help"
    # Local imports in the branches: each command must start without the modules of the others.
    try:
        match command:
            case "plan":
                return plan(words)
            case "doctor" if words[:1] == ["mismatch"]:
                from slime.doctor.mismatch_command import mismatch

                return mismatch(words[1:])
            case "doctor":
                return _doctor(words)
            case "replay":
                from slime.replay.run import replay

                return replay(words)
            case "board":
                from slime.board.command import board

                return board(words)
            case "help" | "-h" | "--help":
                print(_HELP)
                return 0
            case "--version":
                from importlib.metadata import version

                print(version("slime"))
                return 0
            case _:
                raise UsageError(f"{command!r} is not a command of slime: use plan, doctor, replay or board.")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def plan(words: Sequence[str]) -> int:
    """``slime plan``, and ``train.py --plan``.

    Returns:
        0 if the command would start, else 2. The plan is printed in both cases.
    """
    from slime.config.plan.build import HOST_GIB, build

    words, as_json = _take_switch(words, "--json")
    words, _ = _take_switch(words, "--plan")
    words, memory_gib = _take_number(words, "--device-memory-gb", DEVICE_MEMORY_GIB)
    words, host_gib = _take_number(words, "--host-memory-gb", HOST_GIB)
    if not words or words[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    command = read_command(words)
    resolved = _resolve(command)
    args = resolved.args
    if args is None:
        return _refuse(resolved.problems, as_json)
    title = PurePath(str(args.hf_checkpoint)).name if args.hf_checkpoint else "no checkpoint"
    driver = "train_async.py" if command.is_async else "train.py"
    result = build(
        args,
        title=f"{driver} · {title}",
        device_bytes=round(memory_gib * 2**30),
        host_bytes=round(host_gib * 2**30),
        ignored=resolved.ignored,
        problems=resolved.problems,
        missing=resolved.missing,
    )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2, ensure_ascii=False, default=str))
    else:
        from slime.config.plan.render import render

        render(result)
    return 0 if result.is_startable else 2


def _doctor(words: Sequence[str]) -> int:
    """``slime doctor``. Returns 1 if a check fails."""
    if words[:1] == ["ledger"]:
        return _doctor_ledger(words[1:])
    if words[:1] == ["--gpu"]:
        from slime.doctor.gpu_check import gpu_check

        return gpu_check(words[1:])
    from slime.doctor import Situation
    from slime.doctor.run import examine, exit_status, render, render_json

    words, is_deep = _take_switch(words, "--deep")
    words, as_json = _take_switch(words, "--json")
    if words[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    resolved = _resolve(read_command(words)) if words else _Resolved(None, [], [], [])
    findings = examine(Situation(resolved.args, (*resolved.problems, *resolved.missing), is_deep))
    (render_json if as_json else render)(findings)
    return exit_status(findings)


def _doctor_ledger(words: Sequence[str]) -> int:
    from slime.doctor.ledger import examine_ledger
    from slime.utils.errors import DataError

    if len(words) != 1 or words[0].startswith("-"):
        raise UsageError("slime doctor ledger takes one path: the folder of a run, of its checkpoints, or the ledger.")
    try:
        return examine_ledger(Path(words[0]))
    except DataError as error:
        raise UsageError(str(error)) from None


def read_command(words: Sequence[str]) -> TrainCommand:
    """Find the driver's arguments in ``[--] [ENV=x ...] [ray job submit ... --] [python3 ...] [train.py] --flag ...``.

    Raises:
        UsageError: words before the first flag that do not name a driver.
    """
    for index, word in enumerate(words):
        name = PurePath(word).name
        # only the name counts: the path, the interpreter and a launcher such as "ray job submit" come before it
        if name in _DRIVERS and not word.startswith("-"):
            return TrainCommand(list(words[index + 1 :]), _DRIVERS[name])
    # No driver: the words must be the flags alone. A leading "--" only separates them from the options of slime.
    flags = list(words[1:] if words and words[0] == "--" else words)
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r} is neither a flag nor a command with train.py or train_async.py in it.")
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


def _take_switch(words: Sequence[str], switch: str) -> tuple[list[str], bool]:
    return [word for word in words if word != switch], switch in words


def _take_number(words: Sequence[str], flag: str, default: float) -> tuple[list[str], float]:
    rest, value = [], str(default)
    pending = iter(words)
    for word in pending:
        if word == flag:
            value = next(pending, "")
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    try:
        number = float(value)
    except ValueError:
        number = 0.0  # reported below, like NaN and values out of range
    if not 0 < number < _MOST_GIB:
        raise UsageError(f"{flag} {value}: give the memory of one device in GiB, such as {default:g}.")
    return rest, number
