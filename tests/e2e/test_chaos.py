"""A run names a killed or stopped process, or recovers. In the end it equals the undisturbed run.

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
import torch
from safetensors.torch import load_file

from slime.data.ledger import examine_ledger
from tests.doc_commands import shown_flags
from tests.e2e.faults import Broken, broken, shared_memory
from tests.e2e.running import PLUGINS, Finished, exit_status, metrics
from tests.e2e.test_loop import grpo_flags
from tests.limits import Limit

pytestmark = pytest.mark.alone

ROLLOUTS = 4

ORDERLY_S = 10.0
"""Longest time from a death to the error that explains it, and to the end of everything."""

HEARTBEAT_S = 3.0


def exact_flags(task, output: Path, *more: Any) -> list[Any]:
    """Four rollouts that are the same bits every time, a checkpoint after every second one, everything written."""
    return grpo_flags(
        *(task, output, *shown_flags("docs/reproducibility.md", "--deterministic-mode")),
        *("--lr-decay-style", "cosine", "--lr-decay-iters", ROLLOUTS, "--lr", "1e-3", "--min-lr", 0),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 2),
        *("--save-hf", output / "hf_{rollout_id}"),
        *("--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--custom-megatron-before-train-step-hook-path", f"{PLUGINS}:wait_before_a_step"),
        *("--heartbeat-timeout", HEARTBEAT_S, "--num-rollout", ROLLOUTS, *more),
    )


@pytest.fixture(scope="module")
def undisturbed(tiny_task, tmp_path_factory):
    """A run without faults for four rollouts, ended by Ctrl-C in the fifth: (folder, results)."""
    output = tmp_path_factory.mktemp("undisturbed")
    with broken(exact_flags(tiny_task, output, "--num-rollout", 1000), output) as run:
        return output, end_driver(run, signal.SIGINT, ROLLOUTS) | {"progress": run.progress()}


@pytest.fixture(scope="module")
def battered(tiny_task, tmp_path_factory):
    """One command that is given again after each of its deaths: (folder, what each of its three runs left).

    The trainer waits in the phase of each fault, which a fast or busy machine would otherwise miss.
    """
    output = tmp_path_factory.mktemp("battered")
    flags = exact_flags(tiny_task, output)
    seen: dict[str, dict[str, Any]] = {}
    third, fourth = output / "hold_2", output / "hold_3"
    third.touch()
    with broken(flags, output) as run:
        run.break_in("train", 2, "Data Buffer")
        third.unlink()
        seen["killed buffer"] = ended(run)
    third.touch()
    with broken(flags, output) as run:
        seen["killed driver"] = end_driver(run, signal.SIGKILL, 2)
    third.unlink()
    fourth.touch()
    with broken([*flags, "--use-fault-tolerance"], output) as run:
        run.break_in("train", 3, "trainer rank", signal.SIGSTOP)
        fourth.unlink()
        since = Limit(HEARTBEAT_S + ORDERLY_S)
        run.wait(lambda: run.progress().get("restarts") == 1)
        seen["healed"] = {"is_late": since.is_over} | ended(run) | {"progress": run.progress()}
    return output, seen


def end_driver(run: Broken, how: signal.Signals, rollout_id: int) -> dict[str, Any]:
    """Send the driver a signal while it trains on that rollout."""
    run.wait(lambda: run.is_in("train", rollout_id))
    memory = shared_memory(run.mark)
    os.kill(run.process.pid, how)
    return ended(run) | {"memory": memory, "files": left_of(memory)}


def ended(run: Broken) -> dict[str, Any]:
    """The end of the run, and its remaining processes."""
    since = Limit(ORDERLY_S)
    status = exit_status(run.process, run.log)
    survivors = Finished(status, "", run.mark).survivors(within_s=ORDERLY_S)
    return {"status": status, "text": run.text(), "seconds": since.used, "survivors": survivors}


def left_of(files: set[Path]) -> list[Path]:
    limit = Limit(ORDERLY_S)
    while (left := [path for path in files if path.exists()]) and not limit.is_over:
        time.sleep(0.1)
    return left


def test_a_dead_data_buffer_is_named_in_seconds(battered):
    killed = battered[1]["killed buffer"]
    assert killed["status"] == 1, killed["text"][-6000:]
    assert "\nerror: the Data Buffer (pid " in killed["text"]
    assert "it ended without a trace, as after SIGKILL" in killed["text"]
    assert killed["seconds"] < ORDERLY_S
    assert killed["survivors"] == []


@pytest.mark.parametrize(("how", "status"), [("killed", -signal.SIGKILL), ("interrupted", 130)])
def test_a_driver_that_ends_early_leaves_neither_processes_nor_shared_memory(battered, undisturbed, how, status):
    left = {"killed": battered[1]["killed driver"], "interrupted": undisturbed[1]}[how]
    assert left["status"] == status, left["text"][-6000:]
    assert left["survivors"] == []
    assert any(path.name.startswith("sglang_loads_") for path in left["memory"])
    assert left["files"] == []


def test_an_interrupted_run_names_the_rollout_that_it_can_continue_with(undisturbed):
    left = undisturbed[1]
    assert f"The same command continues with rollout {ROLLOUTS}." in left["text"]
    assert left["progress"]["state"] == "interrupted"


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
    assert not healed["is_late"]
    assert healed["progress"]["restarts"] == 1
    assert healed["progress"]["state"] == "finished"
    assert healed["survivors"] == []


def test_after_all_that_prompts_tokens_losses_and_weights_are_those_of_an_undisturbed_run(battered, undisturbed):
    whole, other = undisturbed[0], battered[0]
    for rollout_id in range(ROLLOUTS):
        expected, found = (
            torch.load(output / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"] for output in (whole, other)
        )
        assert [sample["tokens"] for sample in expected] == [sample["tokens"] for sample in found], rollout_id
    expected, found = (load_file(output / f"hf_{ROLLOUTS - 1}" / "model.safetensors") for output in (whole, other))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    steps = last_of_each_step(other)
    assert len(steps) == ROLLOUTS
    assert steps == {step: last_of_each_step(whole)[step] for step in steps}
    assert examine_ledger(other / "checkpoints") == 0


def last_of_each_step(output: Path) -> dict[int, list[float]]:
    """Losses, gradient norms and learning rates. A rollout that was repeated is written again."""
    names = ("train/loss", "train/grad_norm", "train/lr-pg_0")
    records = [record for record in metrics(output / "run") if "train/loss" in record]
    return {record["train/step"]: [record[name] for name in names] for record in records}
