"""``run.json`` in the run's folder: the command of the run, for the board, the replay and the doctor.

Written once by the driver, through the tracker. Secrets of the command line are hidden.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from slime.utils.errors import DataError
from slime.utils.files import replacing

FILE = "run.json"
_PACKAGES = ("slime", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine")
# A checkout on a slow network disk must not delay the start.
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunInfo:
    """The command of a run.

    Attributes:
        driver: ``train.py``, ``train_async.py``, or a user's own.
        argv: its arguments.
        cwd: its working directory, which relative paths of ``argv`` start from.
        started: unix seconds.
        hf_checkpoint: model and tokenizer.
        settings: resolved arguments that are plain values.
        host: name of the driver's machine.
        commit: of the checkout that slime was imported from, with ``+`` for changed files. None without git.
        versions: of installed packages.
    """

    driver: str
    argv: list[str]
    cwd: str
    started: float
    hf_checkpoint: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def resolved(self, path: str | None) -> str | None:
        """``path`` made absolute from the run's directory if it exists there. Names of models in a hub are kept."""
        if path is None or Path(path).is_absolute():
            return path
        place = Path(self.cwd) / path
        return str(place) if place.exists() else path


def write_run_info(run: Path, values: Mapping[str, Any], argv: Sequence[str] | None = None) -> None:
    """Write the file. A resumed run replaces it. ``argv`` defaults to the command line that gave the arguments."""
    settings = plain_settings(values)
    parsed_from = settings.pop("command_line", sys.argv)
    words = list(parsed_from if argv is None else argv)
    info = RunInfo(
        driver=PurePath(words[0]).name if words else "",
        argv=hide_secrets_of_words(words[1:]),
        cwd=str(Path.cwd()),
        started=time.time(),
        hf_checkpoint=settings.get("hf_checkpoint"),
        settings=settings,
        host=socket.gethostname(),
        commit=_commit(),
        versions=_versions(),
    )
    with replacing(run / FILE) as partial:  # atomic: the board may read the old file now
        partial.write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are plain values, with ``***`` for secrets."""
    return {name: hide_secrets(value, name) for name, value in values.items() if _is_plain(value)}


def read_run_info(run: Path) -> RunInfo:
    """The run of a folder.

    Raises:
        DataError: not the folder of a run.
    """
    path = run / FILE
    try:
        # Unknown fields of a newer version are a TypeError.
        return RunInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(
            f"{run} is not the folder of a run: it has no {FILE}; name <output-dir>/<experiment>."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _commit() -> str | None:
    """Short hash of the checkout of this file. None in an installed wheel, or without git."""
    root = Path(__file__).parents[2]
    # git also looks in parents: a wheel in the environment of another repository would get that repository's commit.
    if not (root / ".git").exists():
        return None
    # --exclude: without a tag the answer is always the hash.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


# Keys and passwords among arguments, which no file of a run may hold.
#
# Recognized by their name (a flag, an environment variable, an entry of a JSON object) and by their place in a URL.
# Used wherever arguments are shown: ``run_info``, the W&B sink and the log-prob server.

_HIDDEN = "***"
# The end of a name, in any case, with - or _.
_NAME = re.compile(
    r"(?:(?:wandb|api|access|private|secret)[-_]?key|secret|passw(?:or)?d|(?:hf|hub|auth|access|api|bearer|session)[-_]?token)$",
    re.IGNORECASE,
)
# User and password in a URL.
_IN_URL = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")


def hide_secrets(value: Any, name: str = "") -> Any:
    """``value`` of the argument ``name`` with ``***`` for every secret in it.

    Values of another type are hidden if they are a secret themselves.
    """
    if value is not None and value != "" and _NAME.search(name):
        return _HIDDEN
    match value:
        case dict():
            return {key: hide_secrets(item, str(key)) for key, item in value.items()}
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return hide_secrets_of_words(value)  # a part of a command line, perhaps
        case list() | tuple():
            return [hide_secrets(item) for item in value]
        case str():
            return _hide_in_text(value)
        case _:
            return value


def hide_secrets_of_words(words: Sequence[str]) -> list[str]:
    """The same for a command line, and for settings of variables: ``HF_TOKEN=s``.

    ``--wandb-key s``, ``--wandb-key=s``, ``--train-env-vars '{"HF_TOKEN": "s"}'``.
    """
    result: list[str] = []
    is_value_of_secret = False
    for word in words:
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--")
        if is_value_of_secret and not is_flag:
            result.append(_HIDDEN)
        elif equals and (is_flag or _NAME.search(flag)):
            result.append(f"{flag}={hide_secrets(value, flag)}")
        else:
            result.append(_hide_in_text(word))
        # The next word is the value, unless it is a flag.
        is_value_of_secret = is_flag and not equals and _NAME.search(flag) is not None
    return result


def _hide_in_text(text: str) -> str:
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if (hidden := hide_secrets(found)) != found:
            return json.dumps(hidden, ensure_ascii=False)
    return _IN_URL.sub(_HIDDEN, text)
