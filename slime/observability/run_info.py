"""``run.json`` in the run's folder: the command that made it, so that the board and the replay know what they look at.

Written once by the driver, through the tracker. Secrets of the command line are left out.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from slime.observability.secrets import hide_secrets, hide_secrets_of_words
from slime.utils.errors import DataError
from slime.utils.files import replacing

__all__ = ["FILE", "RunInfo", "read_run_info", "write_run_info"]

FILE = "run.json"


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run.

    Attributes:
        driver: ``train.py``, ``train_async.py``, or a user's own.
        argv: its arguments.
        cwd: where it was started; relative paths of ``argv`` belong there.
        started: unix seconds.
        hf_checkpoint: model and tokenizer.
        settings: resolved arguments that are plain values.
    """

    driver: str
    argv: list[str]
    cwd: str
    started: float
    hf_checkpoint: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def resolved(self, path: str | None) -> str | None:
        """A path of the command line, from wherever the reader was started; the name of a model in a hub stays."""
        if path is None or Path(path).is_absolute():
            return path
        place = Path(self.cwd) / path
        return str(place) if place.exists() else path


def write_run_info(run: Path, args: Namespace, argv: Sequence[str] | None = None) -> None:
    """``argv`` is this process's own command line when it is left out. A resumed run writes the file again."""
    words = list(sys.argv if argv is None else argv)
    settings = {name: hide_secrets(value, name) for name, value in vars(args).items() if _is_plain(value)}
    info = RunInfo(
        driver=PurePath(words[0]).name if words else "",
        argv=hide_secrets_of_words(words[1:]),
        cwd=str(Path.cwd()),
        started=time.time(),
        hf_checkpoint=getattr(args, "hf_checkpoint", None),
        settings=settings,
    )
    with replacing(run / FILE) as partial:  # the board may be reading the one of the start before
        partial.write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")


def read_run_info(run: Path) -> RunInfo:
    """The run of a folder.

    Raises:
        DataError: not the folder of a run.
    """
    path = run / FILE
    try:
        return RunInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(f"{run} is no folder of a run: it holds no {FILE}; name <output-dir>/<experiment>.") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
