"""The cases of ``make chaos`` with two faults, and its slow disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos_pairs import Measured, all_cases, check_history, page_part, slow_disk_variables
from slime.data.schedule import WEIGHTS
from tests.e2e.faults import PHASES, PROCESSES


def test_every_pair_of_processes_occurs_once_in_every_phase_and_both_ways() -> None:
    pairs = [case for case in all_cases() if case.kind == "pair"]
    assert len({case.processes for case in pairs}) == len(pairs) == len(PROCESSES) ** 2
    assert {case.phase for case in pairs} == set(PHASES)
    ways = Counter((case.processes[1], case.is_stopped) for case in pairs)
    assert set(ways.values()) == {len(PROCESSES) // 2}
    assert len({case.text for case in all_cases()}) == len(all_cases())


def test_the_table_has_the_cases_that_were_measured_and_their_number() -> None:
    text = page_part(all_cases(num_kills=1)[-2:], [Measured("kill: random moment 1", 12.3, 1, "all equal")])
    assert text.startswith("1 of 2 cases were measured.")
    assert text.endswith("\n| kill: random moment 1 | 12 | 1 | all equal |")


def test_weights_of_a_version_that_differ_after_a_death_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "rollout" / WEIGHTS
    path.parent.mkdir(parents=True)
    lines = [
        {"event": "begin", "version": 0},
        {"version": 1, "hash": "a"},
        {"version": 2, "hash": "b"},
        {"version": 1, "hash": "a"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert check_history(tmp_path) == 1
    path.write_text("\n".join(map(json.dumps, [*lines, {"version": 2, "hash": "c"}])))
    with pytest.raises(AssertionError, match="'b', 'c'"):
        check_history(tmp_path)


def test_flushes_and_renames_of_a_process_with_a_slow_disk_are_delayed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import os, pathlib; import slime; p = pathlib.Path('a'); p.write_text('x'); p.replace('b'); print('done')"
    env = os.environ | slow_disk_variables(log)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "done\n"
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["replace"]
