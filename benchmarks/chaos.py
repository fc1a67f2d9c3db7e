"""Kill every kind of process in every phase of a run and measure the cost: the table in docs/reliability.md.

    python benchmarks/chaos.py [--only PROCESS] [--phase PHASE] [--record FILE] [--minutes N] [--write]

Each cell of the first table is one SIGKILL in a run with --use-fault-tolerance: seconds until the run has trained on
another rollout, without the seconds that engines and trainer took to start. The second is the same SIGKILL without
the flag: seconds until the command has ended with an error that names the process, and nothing of the run is left. The
same command then continues. In the end the ledger must know of no prompt that was lost or trained on twice.

All of it takes the better part of an hour. With --record every cell is kept as soon as it is measured, and cells that
the file has are not measured again: a command that was interrupted, or was given --minutes, continues when it is given
again. Its exit status is 75 while cells are missing. With none missing --write puts the tables into the page. Begin
anew by deleting the file.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from slime.data.ledger import examine_ledger
from tests.e2e.faults import PHASES, PROCESSES, broken
from tests.e2e.running import Finished
from tests.e2e.test_loop import grpo_flags
from tools.make_tiny_task import TinyTask, make_tiny_task

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
LINGERING = ROOT / "tests" / "e2e" / "lingering_functions.py"
BOUND_S = 10.0
KILLS_OF_A_RUN = 3
"""A run heals three times."""

_NUM_HELD_OUT = 8
# EX_TEMPFAIL of sysexits.h.
_TRY_AGAIN = 75
_MARKS = ("<!-- chaos: begin -->", "<!-- chaos: end -->")


@dataclass
class Cell:
    """One kill.

    Attributes:
        seconds: to the next trained rollout or to the end of the command, without ``startup_s``.
        startup_s: restart of engines and trainer. 0 if nothing was started.
    """

    process: str
    phase: str
    mode: str
    seconds: float
    startup_s: float = 0.0

    @property
    def is_fast(self) -> bool:
        return self.seconds <= BOUND_S


@dataclass
class Table:
    """The cells measured so far, kept in ``record`` if given."""

    record: Path | None
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.record is None:
            return
        self.record.parent.mkdir(parents=True, exist_ok=True)
        if self.record.exists():
            lines = self.record.read_text(encoding="utf-8").splitlines()
            self.cells = [Cell(**json.loads(line)) for line in lines]

    def add(self, cell: Cell, log: str) -> None:
        """Print and record the cell at once. A slow one comes with the last lines of the run."""
        line = json.dumps(asdict(cell))
        print(line if cell.is_fast else f"{log[-8000:]}\n{line}", flush=True)
        self.cells.append(cell)
        if self.record is not None:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def missing(self, process: str, mode: str, phases: Sequence[str]) -> list[str]:
        """Those of ``phases`` that have no cell yet."""
        if process == "driver" and mode == "recovery":
            return []  # without a driver, nothing can recover
        known = {(cell.process, cell.mode, cell.phase) for cell in self.cells}
        return [phase for phase in phases if (process, mode, phase) not in known]


def flags_for(task: TinyTask, output: Path, num_rollout: int, *more: Any) -> list[Any]:
    """A run with every phase in it, and a checkpoint after every rollout."""
    held_out = output / "held_out.jsonl"
    rows = Path(task.eval).read_text(encoding="utf-8").splitlines()[:_NUM_HELD_OUT]
    held_out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return grpo_flags(
        *(task, output, "--num-rollout", num_rollout, "--save", output / "checkpoints"),
        *("--load", output / "checkpoints", "--save-interval", 1),
        *("--eval-prompt-data", "held_out", held_out, "--eval-interval", 1, "--n-samples-per-eval-prompt", 1),
        *("--eval-max-response-len", 4, "--skip-eval-before-train"),
        *("--custom-rm-path", f"{LINGERING}:lingering_reward"),
        *("--custom-reward-post-process-path", f"{LINGERING}:lingering_post_process"),
        *("--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 2),
        *more,
    )


def recover(task: TinyTask, process: str, phases: Sequence[str], table: Table) -> None:
    """Kill in one phase after the other, in one run that heals itself."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        with broken(flags_for(task, output, 2 * len(phases) + 2, "--use-fault-tolerance"), output) as run:
            for number, phase in enumerate(phases):
                killed_at = run.break_in(phase, 2 * number + 1, process)
                # A rollout that was made after the kill. Hence a kill in every second rollout.
                trained_at = run.trained_after(killed_at)
                startup_s = run.startup_s(killed_at)
                if process == "engine":
                    startup_s = max(startup_s, run.engine_start_s())
                seconds = max(0.0, trained_at - killed_at - startup_s)
                table.add(Cell(process, phase, "recovery", seconds, startup_s), run.text())
            status = run.process.wait(120)
            assert status == 0, run.text()[-6000:]
        check_ledger(output)


def end_with_errors(task: TinyTask, process: str, phases: Sequence[str], table: Table) -> None:
    """Kill in one phase after the other. Each time the same command resumes the run."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        flags = flags_for(task, output, 2 * len(phases) + 2)
        for number, phase in enumerate(phases):
            with broken(flags, output) as run:
                killed_at = run.break_in(phase, 2 * number + 1, process)
                status = run.process.wait(90)
                # The time of the end includes the death of every process of the run, not of the driver alone.
                survivors = Finished(status, "", run.mark).survivors(within_s=30.0)
                table.add(Cell(process, phase, "end", time.time() - killed_at), run.text())
                assert not survivors, survivors
                # A killed driver cannot report an error.
                if process != "driver":
                    named = {"engine": "engine 0"}.get(process, f"(the )?{process}")
                    assert status == 1, run.text()[-6000:]
                    assert re.search(f"^error: {named}", run.text(), re.MULTILINE), run.text()[-6000:]
        with broken(flags, output) as run:
            assert run.process.wait(120) == 0, run.text()[-6000:]
        check_ledger(output)


MODES = {"recovery": recover, "end": end_with_errors}


def check_ledger(output: Path) -> None:
    text = io.StringIO()
    assert examine_ledger(output / "run", text) == 0, text.getvalue()


def rows(cells: Sequence[Cell], mode: str) -> str:
    """Processes down, phases across."""
    shown = {(cell.process, cell.phase): cell for cell in cells if cell.mode == mode}
    lines = ["| SIGKILL of | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for process in PROCESSES:
        row = [shown.get((process, phase)) for phase in PHASES]
        if any(row):
            texts = ["" if cell is None else f"{cell.seconds:.1f}" + (" s" if cell.is_fast else " s !") for cell in row]
            lines.append(f"| {process} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def page_part(cells: Sequence[Cell]) -> str:
    starts = sorted(cell.startup_s for cell in cells if cell.startup_s)
    start = f"{starts[len(starts) // 2]:.1f} s" if starts else "not measured"
    return "\n".join(
        [
            "With `--use-fault-tolerance`, seconds until the run has trained on another rollout, without its start",
            f"(median {start}):",
            "",
            rows(cells, "recovery"),
            "",
            "Without it, seconds until the command has ended with the error that names the process, and nothing of",
            "the run is left:",
            "",
            rows(cells, "end"),
        ]
    )


def write(cells: Sequence[Cell]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(PAGE.name, text, _MARKS, page_part(cells)), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROCESSES, action="append", help="kill this kind of process only")
    parser.add_argument("--phase", choices=PHASES, action="append", help="in this phase only")
    parser.add_argument("--mode", choices=MODES, action="append", help="one of the two tables only")
    parser.add_argument("--record", type=Path, help="file that keeps the cells: those it has are not measured again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after that time")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/reliability.md")
    options = parser.parse_args()
    # Without a handler SIGTERM would skip the blocks that end the run's processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    table = Table(options.record)
    end = time.monotonic() + 60 * options.minutes
    is_complete = True
    with tempfile.TemporaryDirectory() as folder:
        task = make_tiny_task(Path(folder))
        for process, mode in itertools.product(options.only or PROCESSES, options.mode or MODES):
            measure = MODES[mode]
            phases = table.missing(process, mode, options.phase or PHASES)
            # The limit of restarts would end a run with more kills, and the cell would measure that end.
            for part in (phases[i : i + KILLS_OF_A_RUN] for i in range(0, len(phases), KILLS_OF_A_RUN)):
                # Checked between runs only: a run that has begun is measured to its end.
                if time.monotonic() >= end:
                    is_complete = False
                    break
                measure(task, process, part, table)
    print(page_part(table.cells))
    if not is_complete:
        return _TRY_AGAIN
    if options.write:
        write(table.cells)
    return int(not all(cell.is_fast for cell in table.cells))


if __name__ == "__main__":
    sys.exit(main())
