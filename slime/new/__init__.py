"""``slime new``: a task of the user as a folder that runs, copied from ``task``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = Path(__file__).parent / "task"
# The files of the template contain it wherever the name of the task belongs.
_NAME = "my_task"
_USABLE = re.compile(r"[A-Za-z0-9][\w.-]*")


def new(words: Sequence[str]) -> int:
    """Write the folder of a task. Returns 2 if it cannot be written, else 0."""
    parser = argparse.ArgumentParser(
        prog="slime new",
        description="Write the folder of a task that runs as it is: data, reward, generation in two turns, evaluation, "
        "tests and the command. Then change it, file by file.",
    )
    parser.add_argument("folder", type=Path, help="a new folder; its name is the name of the task")
    folder = parser.parse_args(list(words)).folder
    if problem := _problem(folder):
        print(f"error: slime new {folder}: {problem}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for source in template_files():
        text = source.read_text(encoding="utf-8").replace(_NAME, folder.name)
        (folder / source.name).write_text(text, encoding="utf-8")
    print(f"{folder} has {', '.join(source.name for source in template_files())}")
    print(f"next: python -m pytest {folder}, then bash {folder}/run.sh; {folder}/README.md describes the files")
    return 0


def template_files() -> list[Path]:
    return sorted(path for path in TEMPLATE.iterdir() if path.is_file())


def _problem(folder: Path) -> str:
    """The reason why ``folder`` cannot be written, else an empty text."""
    if not _USABLE.fullmatch(folder.name):
        return "the name must begin with a letter or digit and have only letters, digits, _, - and dots."
    if folder.is_file():
        return "it is a file. Name a new folder."
    if folder.is_dir() and any(folder.iterdir()):
        return "it has files already, and none is replaced. Name a new folder."
    return ""
