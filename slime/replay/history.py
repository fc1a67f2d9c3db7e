"""``slime replay RUN --all`` and ``slime branch``: execute a recorded schedule, and compare tokens, losses and weights.

    schedule.jsonl of the run ──▶ branch.jsonl ──▶ train.py with slime.rollout.scheduled_rollout, in a folder beside
    weights.jsonl, samples, metrics.jsonl ──▶ compared: the first token, loss and weight that differ

The new run uses the real engines and the real trainer, with the flags of the recorded one. A branch begins with a
checkpoint of the recorded run, and may change flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.training.checkpoint_files import complete_iterations, iteration_of
from slime.data.ledger import LineFile, find_ledger
from slime.data.schedule import BRANCH, SCHEDULE, WEIGHTS, Planned, Weights, read_schedule, read_weights
from slime.observability.run_info import RunInfo, read_run_info
from slime.observability.sample_record import read_rows, record_file, sample_of_row
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils.errors import DataError

_SCHEDULED = "slime.rollout.scheduled_rollout.generate_rollout"
# Flags of files that belong to the recorded run, of trackers, of evaluations, and of the asynchronous loop. A replay
# sends every version to the engines: a restart may have sent one that --update-weights-interval leaves out.
_LEFT_OUT = frozenset(
    shlex.split(
        """
        --output-dir --experiment-name --save --save-interval --save-hf --save-debug-rollout-data
        --save-debug-train-data --async-save --ci-save-grad-norm --trackers --use-wandb --wandb-key --wandb-project
        --wandb-group --use-tensorboard --tb-project-name --tb-experiment-name --metrics-port --eval-interval
        --eval-prompt-data --eval-config --background-eval --eval-function-path --rollout-function-path
        --async-buffer-size --max-weight-staleness --update-weights-interval --strict-args
        """
    )
)


@dataclass(frozen=True)
class History:
    """The record of one run.

    Attributes:
        folder: of the run.
        batches: rollout -> its samples.
        weights: version -> its weights.
        losses: step -> loss.
    """

    folder: Path
    batches: dict[int, list[Planned]]
    weights: dict[int, Weights]
    losses: dict[int, float]

    @classmethod
    def of(cls, folder: Path) -> History:
        """Raises DataError if the run recorded no schedule."""
        ledger = find_ledger(folder)
        batches, weights = read_schedule(ledger.with_name(SCHEDULE)), read_weights(ledger.with_name(WEIGHTS))
        return cls(folder, batches, weights, dict(_losses(folder)))


def _losses(folder: Path) -> Iterator[tuple[int, float]]:
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line that a death cut off: the next start goes on below it
            record = json.loads(line)
            if "train/loss" in record:
                yield int(record["train/step"]), record["train/loss"]


def replay_all(folder: Path, name: str) -> int:
    """Execute the schedule of a run again. ``name``: of the new run's folder, beside that of the recorded one.

    Returns:
        0 if all weights equal the recorded ones, 1 if not.
    """
    return _branch(folder, 0, name, ())


def branch(words: Sequence[str]) -> int:
    """The command ``slime branch``.

    Returns:
        0 if all tokens, losses and weights equal the recorded ones, 1 if not.

    Raises:
        SlimeError: the branch is impossible.
    """
    parser = argparse.ArgumentParser(
        prog="slime branch",
        usage="slime branch RUN --at ROLLOUT [--name NAME] -- [flag ...]",
        description="Continue a recorded deterministic run with changed flags, and name the first token, loss and "
        "weight that differ. Without changed flags none differs.",
    )
    parser.add_argument("run", type=Path, help="folder of the run: <output-dir>/<experiment>")
    parser.add_argument("--at", type=int, required=True, metavar="ROLLOUT", help="first rollout with the flags")
    parser.add_argument("--name", metavar="NAME", help="the folder beside RUN; default: RUN-branch-ROLLOUT")
    own, flags = _divided(words)
    options = parser.parse_args(own)
    folder = options.run.resolve()
    return _branch(folder, options.at, options.name or f"{folder.name}-branch-{options.at}", flags)


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after ``--``."""
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def _branch(folder: Path, first: int, name: str, flags: Sequence[str]) -> int:
    info, recorded = read_run_info(folder), History.of(folder)
    argv = list(replay_argv(info))
    start = [] if first == 0 else ["--load", _checkpoint(info, first), "--ckpt-step", str(first - 1)]
    reference = info.resolved(info.settings.get("ref_load"))
    if start and reference is not None:
        start += ["--ref-load", reference]  # otherwise the reference model would be the checkpoint of --load
    again = folder.with_name(name)
    if again.exists():
        raise DataError(f"{again} exists: delete it, or name another folder with --name.")
    again.mkdir()
    schedule = again / BRANCH
    shutil.copyfile(find_ledger(folder).with_name(SCHEDULE), schedule)
    lines = LineFile(schedule)
    for sample in _begun(recorded, first):
        lines.append({"begun": sample})
    lines.close()
    _run(
        [*argv, "--rollout-function-path", _SCHEDULED, "--replay-schedule", str(schedule), *start, *flags], info, again
    )
    return compare(recorded, History.of(again))


def _checkpoint(info: RunInfo, first: int) -> str:
    """The directory with the run's checkpoint before rollout ``first``.

    Raises:
        DataError: the run has none.
    """
    save = info.resolved(info.settings.get("save"))
    kept = [] if save is None else [iteration_of(path) for path in complete_iterations(Path(save))]
    if save is None or first - 1 not in kept:
        places = ", ".join(str(number + 1) for number in kept if number is not None)
        raise DataError(
            f"--at {first}: the run has no checkpoint of rollout {first - 1} (--save, --save-interval). It can be "
            f"branched at rollout 0{f', {places}' if places else ''}."
        )
    return save


def _begun(recorded: History, first: int) -> Iterator[dict[str, Any]]:
    """The samples of later rollouts that were begun by weights before the branch."""
    for rollout in sorted(number for number in recorded.batches if number >= first):
        rows = recorded.batches[rollout]
        old = [place for place, row in enumerate(rows) if any(v is not None and v < first for v, _ in row.parts)]
        path = record_file(recorded.folder, "rollout", rollout)
        known = {row["position"]: row for row in read_rows(path)} if old and path.is_file() else {}
        for place in old:
            if place in known:
                yield sample_of_row(known[place]).to_dict()


def replay_argv(info: RunInfo) -> Iterator[str]:
    """The flags of the run that decide its numbers.

    Raises:
        DataError: the run used --keep-old-actor.
    """
    if info.settings.get("keep_old_actor"):
        raise DataError(
            "the run used --keep-old-actor: its old log-probs come from weights that served when a rollout was "
            "generated, and the schedule does not record them. It cannot be executed again."
        )
    left_out = _LEFT_OUT
    # --load with another directory is the start of the run, also of its replay
    load, save = (info.resolved(info.settings.get(name)) for name in ("load", "save"))
    if load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save):
        left_out |= {"--load"}  # it is there for a restart: the run began without it
    return without(info.argv, left_out)


def without(argv: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """The words of a command line without ``flags`` and their values."""
    is_dropped = False
    for word in argv:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in flags
        if not is_dropped:
            yield word


def _run(argv: Sequence[str], info: RunInfo, folder: Path) -> None:
    """Run ``train.py`` with its record in ``folder``. Raises DataError if it fails."""
    where = ["--output-dir", str(folder.parent), "--experiment-name", folder.name]
    evaluates = ["--eval-function-path", DEFAULT_ROLLOUT_FUNCTION]
    command = [sys.executable, "-m", "slime", "train", *argv, *evaluates, *where]
    status = subprocess.run(command, cwd=info.cwd if Path(info.cwd).is_dir() else None, check=False).returncode
    if status != 0:
        raise DataError(f"the run in {folder} ended with status {status}: see {folder / 'run.log'}.")


def compare(recorded: History, now: History) -> int:
    """Print the first differences of two runs. Returns 0 if there are none, else 1."""
    rows = {
        "token": _first_token(recorded, now),
        "loss": _first_loss(recorded, now),
        "weight": _first_weight(recorded, now),
    }
    # Runs of different lengths are compared as far as both go.
    is_same = not any(rows.values())
    shared = sorted(recorded.weights.keys() & now.weights.keys())
    print(f"{len(recorded.batches.keys() & now.batches.keys())} rollouts, {len(shared)} weight versions compared")
    for what, found in rows.items():
        print(f"  first {what + ' that differs':<22} {found or 'none'}")
    if shared:
        last = shared[-1]
        before, after = recorded.weights[last].hash, now.weights[last].hash
        print(
            f"  weights of version {last:<10} recorded {before}, now {after}{'' if before == after else '   differs'}"
        )
    return 0 if is_same and shared else 1


def _first_token(recorded: History, now: History) -> str:
    for rollout in sorted(recorded.batches.keys() & now.batches.keys()):
        before, after = recorded.batches[rollout], now.batches[rollout]
        for place, (one, other) in enumerate(zip(before, after, strict=False)):
            if (one.index, one.crc) != (other.index, other.crc):
                return f"rollout {rollout}, sample {one.index}{_token(recorded, now, rollout, place)}"
        if len(before) != len(after):
            return f"rollout {rollout}: recorded are {len(before)} samples, now there are {len(after)}"
    return ""


def _token(recorded: History, now: History, rollout: int, place: int) -> str:
    """The position of the token, if both runs recorded the sample."""
    rows: list[Any] = []
    for run in (recorded, now):
        path = record_file(run.folder, "rollout", rollout)
        found = [row["tokens"] for row in read_rows(path) if row["position"] == place] if path.is_file() else []
        rows += found
    if len(rows) < 2:
        return " (its tokens are not recorded: --record-samples)"
    one, other = map(list, rows)
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    values = [str(tokens[at]) if at < len(tokens) else "the end" for tokens in (one, other)]
    return f", token {at}: recorded {values[0]}, now {values[1]}"


def _first_loss(recorded: History, now: History) -> str:
    for step in sorted(recorded.losses.keys() & now.losses.keys()):
        before, after = recorded.losses[step], now.losses[step]
        if before != after:
            return f"step {step}: recorded {before!r}, now {after!r}"
    return ""


def _first_weight(recorded: History, now: History) -> str:
    for version in sorted(recorded.weights.keys() & now.weights.keys()):
        name = recorded.weights[version].first_difference(now.weights[version])
        if name is not None:
            return f"version {version}, {name}"
    return ""
