"""``slime board``: a web page over the files of a run, live while it trains.

``run_data`` reads the files, ``server`` answers the page's questions, ``static`` is the page. Knows files only: nothing
here imports torch, Ray, Megatron or SGLang, and nothing else imports this room.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

from slime.utils.errors import DataError
from slime.utils.net import url_host

_PORT = 9265


def board(words: Sequence[str]) -> int:
    """Serve the page of one or several runs until interrupted."""
    parser = argparse.ArgumentParser(
        prog="slime board",
        description="A web page over the files of runs: curves, comparison, step times and samples, live during a run.",
    )
    parser.add_argument(
        "folder", type=Path, help="folder of a run, <output-dir>/<experiment>, or of several runs: <output-dir>"
    )
    parser.add_argument("--port", type=_port, default=_PORT, help="default %(default)s")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, default %(default)s: only this machine. Any other address lets everyone who "
        "reaches it read every prompt and response of the runs",
    )
    options = parser.parse_args(list(words))
    from slime.board.runs import Runs
    from slime.board.server import serve

    runs = Runs(options.folder.resolve())
    # Bound before the address is printed: the port may be that of another board.
    with _listen(options.host, options.port) as opened:
        print(f"{runs.folder} at http://{url_host(options.host)}:{options.port}  (end with Ctrl-C)", flush=True)
        serve(runs, options.host, opened)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise DataError(
            f"--port {port}: cannot listen on {host}: {error.strerror}. If another board uses it, choose another port."
        ) from None


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be a port from 1 to 65535")
    return number
