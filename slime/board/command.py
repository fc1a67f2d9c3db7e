"""The command ``slime board``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.observability.run_info import FILE
from slime.utils.errors import DataError
from slime.utils.net import url_host

_PORT = 9265


def board(words: Sequence[str]) -> int:
    """Serve the page of a run until interrupted."""
    parser = argparse.ArgumentParser(
        prog="slime board",
        description="A web page over the files of a run: curves, step times and samples, live while it trains.",
    )
    parser.add_argument(
        "run", type=Path, help="folder of the run, <output-dir>/<experiment>; of an <output-dir>, its newest run"
    )
    parser.add_argument("--port", type=_port, default=_PORT, help="default %(default)s")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, default %(default)s: only this machine. Any other address lets everyone who "
        "reaches it read every prompt and response of the run",
    )
    options = parser.parse_args(list(words))
    from slime.board.run_data import RunData
    from slime.board.server import serve

    try:
        data = RunData(_chosen_run(options.run.resolve()))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{data.run} at http://{url_host(options.host)}:{options.port}  (end with Ctrl-C)", flush=True)
    serve(data, options.host, options.port)
    return 0


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be a port from 1 to 65535")
    return number


def _chosen_run(folder: Path) -> Path:
    """``folder`` itself, or the newest run in it."""
    runs = [] if (folder / FILE).is_file() else sorted(folder.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else folder
