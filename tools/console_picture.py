"""Run a command in a new terminal and write a picture of its screen as SVG.

    python tools/console_picture.py --output docs/images/console.svg -- bash my_task/run.sh

The output of the command also goes to standard output. With ``--at TEXT`` the picture shows the first moment at which
TEXT is on the screen, such as a line that is replaced later.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.text import Text

from slime.observability.logging_utils import plain
from slime.observability.terminal import WIDE

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def output_of(command: list[str], rows: int) -> Iterator[str]:
    """Everything that ``command`` has written so far, after every write. Ends with the command.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, WIDE, 0, 0))
    env = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    written = b""
    while data := _read(ours):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        written += data
        yield written.decode("utf-8", errors="replace")
    os.close(ours)
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux reports the end of the other side as an error
        return b""


def screen_of(written: str, rows: int) -> list[str]:
    """The last ``rows`` lines, each as it is after all replacements."""
    return [plain(line) for line in written.rstrip("\n").split("\n")][-rows:]


def svg(lines: list[str], title: str) -> str:
    console = Console(record=True, width=WIDE, file=io.StringIO(), legacy_windows=False)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    # A page must not load fonts from other servers. The picture names monospace as the second choice.
    return _FONTS.sub("", console.export_svg(title=title, unique_id="console"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="The SVG file.")
    parser.add_argument("--rows", type=int, default=40, help="Rows of the screen.")
    parser.add_argument(
        "--at", metavar="TEXT", help="Take the picture when TEXT is on the screen. Default: at the end."
    )
    parser.add_argument("command", nargs="+", help="The command, after --.")
    options = parser.parse_args()
    lines: list[str] = []
    for written in output_of(options.command, options.rows):
        if not (options.at and any(options.at in line for line in lines)):
            lines = screen_of(written, options.rows)
    options.output.write_text(svg(lines, shlex.join(options.command)), encoding="utf-8")
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
