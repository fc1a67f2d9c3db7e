"""The Python interface: ``slime.train``, ``slime.train_async`` and ``slime.load_run``.

    run = slime.train(hf_checkpoint="model", prompt_data="train.jsonl", rm_type="math", num_rollout=10)
    run.metrics["rollout/raw_reward"].dropna().plot()

``import slime`` loads nothing of this module before one of these names is used. Data frames need pandas.
"""

from __future__ import annotations

import argparse
import difflib
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime.config.groups import flag_of
from slime.config.parse import HINT, build_parser
from slime.observability.run_info import RunInfo, read_run_info
from slime.ray import arguments
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunRecord", "command_line", "load_run", "train", "train_async"]

# Prefixes of flags that another parser reads: the engine's and its router's.
_ENGINE = ("sglang_", "router_")
# Recorded columns that ``samples`` leaves out.
_LEFT_OUT = ("trained_tokens", "seconds", "snippet")


@dataclass(frozen=True)
class RunRecord:
    """The files in a run's folder. Every access reads them again, so a run may still be training.

    Attributes:
        info: the command, its directory and its start.
    """

    path: Path
    info: RunInfo

    @property
    def config(self) -> dict[str, Any]:
        """The resolved arguments that are plain values."""
        return self.info.settings

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per step of training, rollout or evaluation; the index is its number, a column its metric.

        The column ``step_key`` names the kind of step: ``train/step``, ``rollout/step`` or ``eval/step``.
        """
        frame = _pandas().DataFrame(self.metric_rows())
        return frame.set_index("step") if len(frame) else frame

    @property
    def samples(self) -> pd.DataFrame:
        """One row per recorded sample of a rollout or an evaluation (``--record-samples``)."""
        return _pandas().DataFrame(list(self.sample_rows()))

    def metric_rows(self) -> list[dict[str, Any]]:
        """The rows of :attr:`metrics` without pandas."""
        rows: dict[tuple[str, float], dict[str, Any]] = {}
        path = self.path / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                record = json.loads(line)
                key = record["step_key"]
                step = record.pop(key)
            except (ValueError, KeyError, TypeError):
                continue  # a crash may cut the last line
            # A resumed run repeats steps: the last value counts.
            rows.setdefault((key, step), {"step": step}).update(record)
        return list(rows.values())

    def sample_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of :attr:`samples` without pandas."""
        from slime.observability.sample_record import FOLDER, LIGHT, read_rows

        names = [name for name in LIGHT if name not in _LEFT_OUT]
        for path in sorted((self.path / FOLDER).glob("*.parquet")):
            kind, _, number = path.stem.partition("_")
            if kind not in ("rollout", "eval"):
                continue
            for row in read_rows(path, (*names, "prompt", "response", "rest")):
                texts = {"prompt": json.loads(row["prompt"]), "label": json.loads(row["rest"]).get("label")}
                of_row = {name: row[name] for name in names}
                yield {"kind": kind, "rollout": int(number), **of_row, **texts, "response": row["response"]}


def load_run(path: str | Path) -> RunRecord:
    """The record of a run from its folder, ``<output-dir>/<experiment-name>``.

    Raises:
        DataError: not the folder of a run.
    """
    folder = Path(path).resolve()
    return RunRecord(folder, read_run_info(folder))


def train(**flags: Any) -> RunRecord:
    """Run ``train.py`` in this process. Keyword arguments are its flags: ``lr=1e-5`` for ``--lr 1e-5``.

    Args:
        flags: True gives a switch, a list several words, a dict a JSON object, None nothing. A function of a module may
            be given instead of its path. Flags of engines are ``sglang_<option>``.

    Returns:
        The record of the finished run.

    Raises:
        ConfigError: with every problem of the flags.
        SlimeError: the run failed.
        TypeError: an unknown keyword.
    """
    from slime.ray.run import main

    return _run(main.train, flags, is_async=False)


def train_async(**flags: Any) -> RunRecord:
    """Run ``train_async.py`` in this process, as :func:`train`."""
    from slime.ray.run import main

    return _run(main.train_async, flags, is_async=True)


def _run(loop: Callable[[Namespace], None], flags: Mapping[str, Any], *, is_async: bool) -> RunRecord:
    args, problems = arguments.parse_only(command_line(flags), is_async=is_async)
    if args is not None:
        problems += arguments.machine_problems(args)
    if args is None or problems:
        raise ConfigError(problems)
    # Ray and torch take seconds to import: wrong flags are reported before.
    from slime.observability.logging_utils import driver_logs
    from slime.observability.tracking import run_directory
    from slime.ray.run.main import run_arguments
    from slime.utils.async_utils import interruptible

    is_main = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    with driver_logs():
        arguments.log_notices(args)
        run_arguments(loop, args, interruptible() if is_main else nullcontext())
    return load_run(run_directory(args))


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """The words of a command line for keyword arguments.

    Raises:
        TypeError: a name is not a flag, or a function cannot be loaded by other processes.
    """
    actions = {action.dest: action for action in build_parser(arguments.GROUPS)._actions}
    words: list[str] = []
    for name, value in flags.items():
        action = actions.get(name)
        if action is None and not name.startswith(_ENGINE):
            near = difflib.get_close_matches(name, actions, n=1, cutoff=0.75)
            raise TypeError(f"{name} is not a flag of slime{f'; {HINT} {near[0]}?' if near else '.'}")
        if value is not None:
            words += _words(flag_of(name), action, value)
    return words


def _words(flag: str, action: argparse.Action | None, value: Any) -> list[str]:
    """The words of one flag. An engine's flag has no action."""
    if isinstance(value, bool) and (action is None or action.nargs == 0):
        if isinstance(action, argparse.BooleanOptionalAction):
            return [action.option_strings[0 if value else 1]]
        spelling = flag if action is None else action.option_strings[0]
        return [spelling] if action is None or value == action.const else []
    if isinstance(value, list | tuple):
        return [flag, *(_word(flag, item) for item in value)]
    return [f"{flag}={_word(flag, value)}"]  # with "=": a value may begin with a dash


def _word(flag: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    if not callable(value):
        return str(value)
    module, name = value.__module__, value.__qualname__
    if module == "__main__" or "<" in name:
        raise TypeError(
            f"{flag}: {name} is defined in {module}, and other processes of the run load the function again. Write it "
            f"into a file and give 'file.py:{name.rpartition('.')[2]}'."
        )
    return f"{module}:{name}"


def _pandas() -> ModuleType:
    try:
        return import_module("pandas")
    except ImportError as error:
        raise ImportError(
            "data frames need pandas: pip install 'slime[pandas]'. metric_rows() and sample_rows() need nothing."
        ) from error
