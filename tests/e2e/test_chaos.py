"""Processes of a run that are killed or stopped: it says who, or goes on by itself; in the end it is the same run.

The full table of processes and phases is made by ``make chaos``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slime.doctor.ledger import examine_ledger
from tests.e2e.conftest import assert_same_run, exact_flags
from tests.e2e.faults import Broken, broken, shared_memory
from tests.e2e.running import Finished, metrics

ORDERLY_S = 10.0
"""Longest time from a death to the error that explains it, and to the end of everything."""

HEARTBEAT_S = 3.0


@pytest.fixture(scope="module")
def battered(tiny_task, tmp_path_factory):
    """One command that is given again after each of its deaths: (folder, what each of its four runs left)."""
    output = tmp_path_factory.mktemp("battered")
    flags = exact_flags(tiny_task, output, "--heartbeat-timeout", HEARTBEAT_S)
    seen: dict[str, dict[str, Any]] = {}
    with broken(flags, output) as run:
        killed_at = run.break_in("train", 3, "Data Buffer")
        seen["killed buffer"] = ended(run, killed_at)
    for name, how in (("killed driver", signal.SIGKILL), ("interrupted driver", signal.SIGINT)):
        with broken(flags, output) as run:
            run.wait(lambda: run.is_in("train", 2))
            memory = shared_memory(run.mark)
            os.kill(run.process.pid, how)
            seen[name] = ended(run, time.time()) | {"memory": memory, "files": left_of(memory)}
    with broken([*flags, "--use-fault-tolerance"], output) as run:
        stopped_at = run.break_in("train", 3, "trainer rank", signal.SIGSTOP)
        run.wait(lambda: run.progress().get("restarts") == 1)
        noticed_s = run.progress()["started"] - stopped_at
        seen["healed"] = ended(run, stopped_at) | {"noticed_s": noticed_s, "progress": run.progress()}
    return output, seen


def ended(run: Broken, since: float) -> dict[str, Any]:
    """How the run ended, and which of its processes have not."""
    status = run.process.wait(120)
    seconds = time.time() - since
    survivors = Finished(status, "", run.mark, 0.0).survivors(within_s=ORDERLY_S)
    return {"status": status, "text": run.text(), "seconds": seconds, "survivors": survivors}


def left_of(files: set[Path]) -> list[Path]:
    deadline = time.monotonic() + ORDERLY_S
    while (left := [path for path in files if path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_a_dead_data_buffer_is_named_in_seconds(battered):
    killed = battered[1]["killed buffer"]
    assert killed["status"] == 1, killed["text"][-6000:]
    assert "\nerror: the Data Buffer (pid " in killed["text"]
    assert "it ended without a trace, as after SIGKILL" in killed["text"]
    assert killed["seconds"] < ORDERLY_S
    assert killed["survivors"] == []


@pytest.mark.parametrize(("how", "status"), [("killed driver", -signal.SIGKILL), ("interrupted driver", 130)])
def test_a_driver_that_ends_early_leaves_neither_processes_nor_shared_memory(battered, how, status):
    left = battered[1][how]
    assert left["status"] == status, left["text"][-6000:]
    assert left["survivors"] == []
    assert any(path.name.startswith("sglang_loads_") for path in left["memory"])
    assert left["files"] == []


def test_a_run_outlives_a_stopped_trainer_rank_and_says_where_the_others_were(battered):
    healed = battered[1]["healed"]
    assert healed["status"] == 0, healed["text"][-6000:]
    found = re.search(
        r"trainer rank \d \(pid \d+ on [\d.]+\) did not answer while the driver .*", healed["text"], re.DOTALL
    )
    assert found is not None, healed["text"][-6000:]
    report = found[0]
    assert "for the trainer to train on rollout 3: it was stopped, as by SIGSTOP" in report
    assert "its last lines" in report
    assert "is at:\n" in report, "where the surviving rank is"
    assert "/slime/" in report[report.index("is at:") :]
    assert healed["noticed_s"] < HEARTBEAT_S + ORDERLY_S
    assert healed["progress"]["restarts"] == 1
    assert healed["progress"]["state"] == "finished"
    assert healed["survivors"] == []


def test_after_all_that_prompts_tokens_losses_and_weights_are_those_of_an_undisturbed_run(battered, undisturbed_run):
    output = battered[0]
    assert_same_run(undisturbed_run, output)
    assert last_of_each_step(output) == last_of_each_step(undisturbed_run)
    assert examine_ledger(output / "checkpoints") == 0


def last_of_each_step(output: Path) -> dict[int, list[float]]:
    """Losses, gradient norms and learning rates. A rollout that was repeated is written again."""
    names = ("train/loss", "train/grad_norm", "train/lr-pg_0")
    records = [record for record in metrics(output / "run") if "train/loss" in record]
    return {record["train/step"]: [record[name] for name in names] for record in records}
