"""``slime doctor --gpu``: measurements that prove that a trainer works on this device, one line per check.

    slime doctor --gpu [--only attention,logprobs] [--small] [--json]

Every section runs in a new process for less than four minutes, so that one that hangs or runs out of memory leaves the
others alone. Needs torch and megatron-core, but neither Ray nor SGLang. Without a CUDA device the checks that need one
are skipped. ``--small`` takes tiny models and sizes. ``--json`` prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from slime.utils.errors import kept
from slime.utils.process import GuardedProcess, log_tail, watch_owner

SECTION_LIMIT_S = 240.0
SECTIONS = {
    "environment": "gpu_kernels",
    "attention": "gpu_kernels",
    "logprobs": "gpu_kernels",
    "parity": "gpu_training",
    "transformer_engine": "gpu_training",
    "ipc": "gpu_kernels",
    "offload": "gpu_speed",
    "save": "gpu_speed",
    "determinism": "gpu_training",
    "speed": "gpu_speed",
    "moe_speed": "gpu_speed",
    "payload": "gpu_speed",
    "optimizer": "gpu_speed",
}
"""Section -> module of this folder with the function of that name. In the order of value per minute."""

_MARKS = {"pass": "ok  ", "fail": "FAIL", "skipped": "skip"}


def gpu_check(words: Sequence[str], stream: IO[str] | None = None) -> int:
    """Run the sections that ``words`` name. Returns 1 if a check failed, 2 if ``words`` cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="slime doctor --gpu", description=__doc__, add_help=True)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(list(words))
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        parser.error(f"--only {','.join(unknown)}: unknown. The sections are {', '.join(SECTIONS)}.")
    out = stream or sys.stdout
    counts = dict.fromkeys(_MARKS, 0)
    # tiny sections share a process, because imports would take most of their time
    for part in [names] if options.small else [[name] for name in names]:
        for line in run_sections(part, is_small=options.small):
            counts[line["status"]] += 1
            print(json.dumps(line) if options.json else _text(line), file=out, flush=True)
    if not options.json:
        print(f"\n{counts['pass']} ok, {counts['skipped']} skipped, {counts['fail']} failed", file=out)
    return int(counts["fail"] > 0)


def run_sections(names: Sequence[str], *, is_small: bool, limit_s: float = SECTION_LIMIT_S) -> Iterator[dict[str, Any]]:
    """The checks of sections, from one new process. An early end is a failed check of the section that ran last."""
    with tempfile.TemporaryDirectory() as folder:
        log, lines = Path(folder, "log"), Path(folder, "lines")
        lines.touch()
        argv = [sys.executable, "-m", "slime.doctor.gpu_check", str(lines), *(["--small"] if is_small else []), *names]
        # torch refuses products of matrices in deterministic mode without the first. Ray gives its workers the second:
        # with 16 threads an operator of the host took up to 60 ms between the kernels of a step
        usual = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
        process = GuardedProcess(argv, log_path=log, env=usual | os.environ)
        started, name = time.monotonic(), names[0]
        try:
            with lines.open(encoding="utf-8") as file:
                status = None
                while status is None and time.monotonic() - started < limit_s:
                    status = process.exit_code()  # before the lines: the last ones may come with the end
                    for text in file:
                        found = json.loads(text)
                        name = found.pop("section")
                        if found:
                            yield found
                    time.sleep(0.05)
        finally:
            process.stop()
        if status != 0:
            how = f"ended with exit status {status}" if status is not None else f"took longer than {limit_s:g} s"
            reason = f"the section {how}. Its last lines:\n{log_tail(log)}"
            yield {"check": f"{name}.section", "status": "fail", "reason": reason, "figures": {}}


def _text(line: dict[str, Any]) -> str:
    return f"{_MARKS[line['status']]}  {line['check']}: {line['reason']}\n      {json.dumps(line['figures'])}"


def _run(names: Sequence[str], path: str, *, is_small: bool) -> None:
    """Body of the process of sections: append a line to ``path`` when one begins, and when a check is known."""
    watch_owner()
    with Path(path).open("a", encoding="utf-8") as file:
        for name in names:
            print(json.dumps({"section": name}), file=file, flush=True)
            section: Callable[[bool], Iterator[Any]] = getattr(import_module(f"slime.doctor.{SECTIONS[name]}"), name)
            started = time.monotonic()
            errors: list[Exception] = []
            with kept(errors):  # any part of a trainer may fail: the next section still runs
                for result in section(is_small):
                    seconds = round(time.monotonic() - started, 1)
                    print(json.dumps({"section": name, **vars(result), "s": seconds}), file=file, flush=True)
            if errors:
                failed = {"check": f"{name}.section", "status": "fail", "figures": {}}
                trace = "".join(traceback.format_exception(errors[0]))
                failed["reason"] = f"the section raised an error:\n{trace[-3000:]}"
                print(json.dumps({"section": name, **failed}), file=file, flush=True)


if __name__ == "__main__":
    _run([word for word in sys.argv[2:] if word != "--small"], sys.argv[1], is_small="--small" in sys.argv)
    os._exit(0)  # a regular end of the interpreter waits for threads of process groups
