"""Engines that die in the middle of a rollout: the run goes on, loses nothing, and the engine serves again.

The asynchronous loop is here. The synchronous one, with several models, is in ``test_served_models``.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import httpx

from slime.data.ledger import examine_ledger
from tests.e2e.running import PLUGINS, Finished, metrics, values
from tests.e2e.warm import COLD
from tests.e2e.watching import (
    Running,
    freeze,
    is_generating,
    read,
    read_engines_url,
    running,
    scheduler_of,
    server_of,
    serving,
    thaw,
)

ROLLOUTS = 3


def flags_for(
    task, output: Path, *more: Any, reward: str = "share_of_sevens", num_rollout: int = ROLLOUTS
) -> list[Any]:
    """Rollouts whose generation a file ``hold`` prolongs."""
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", 8, "--n-samples-per-prompt", 8, "--rollout-max-response-len", 160),
        *("--rollout-shuffle", "--custom-rm-path", f"{PLUGINS}:{reward}"),
        *("--fp32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--actor-num-gpus-per-node", 1, "--num-rollout", num_rollout),
        *("--sglang-context-length", 256, "--sglang-max-total-tokens", 16384, "--lr", "1e-4"),
        *("--check-weight-update-equal", "--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        # On a busy machine an engine may be silent for seconds. A death is seen without a request.
        *("--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 60),
        *("--custom-generate-function-path", f"{PLUGINS}:generate_while_held"),
        *("--output-dir", output, "--experiment-name", "run"),
        *more,
    ]


def samples_of(run: Running, finished: Finished, num_rollout: int = ROLLOUTS) -> list[list[dict[str, Any]]]:
    """The samples of each rollout: every prompt in order and once, every sample whole."""
    import torch

    assert finished.status == 0, finished.output[-6000:]
    dumps = [torch.load(run.output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(num_rollout)]
    groups = [sorted({sample["group_index"] for sample in dump}) for dump in dumps]
    assert [index for group in groups for index in group] == list(range(num_rollout * 8))
    assert all(len(dump) == 64 for dump in dumps)
    assert {sample["status"] for dump in dumps for sample in dump} <= {"completed", "truncated"}
    assert len(values(metrics(run.output / "run"), "train/loss")) == num_rollout
    assert finished.survivors() == []
    return dumps


def versions_of(dumps: list[list[dict[str, Any]]]) -> list[set[int]]:
    """Versions of the weights that made each rollout."""
    return [{int(version) for sample in dump for version in sample["weight_versions"]} for dump in dumps]


def seconds_to_recovery(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"serves again, ([\d.]+) s after", output)]


def test_engines_join_leave_and_are_preempted_while_a_rollout_goes_on_and_nothing_is_lost(tiny_task, tmp_path):
    more = ("--rollout-num-gpus", 1, "--engines-port", 0, "--sglang-log-level-http", "info")
    flags = flags_for(tiny_task, tmp_path, *more)
    hold = tmp_path / "hold"
    hold.touch()  # the first rollout goes on until all of it has happened
    with running(flags, tmp_path) as run:
        _, first = run.urls()
        run.wait(lambda: is_generating(first))
        engines = run.wait(lambda: read_engines_url(tmp_path))
        assert httpx.post(engines, json={"count": 2}, timeout=600).status_code == 200
        second = run.wait(lambda: (serving(engines) or [None])[1:])[0]
        run.wait(lambda: freeze(second))
        server_of(second).send_signal(signal.SIGTERM)
        log = tmp_path / "run" / "engines" / "engine_1.log"
        run.wait(lambda: "POST /abort_request" in log.read_text())
        thaw(second)  # it reads the abort before it generates another token
        run.wait(lambda: "engine 1 serves again" in run.text())
        second = run.last_url(1)
        run.wait(lambda: is_generating(first) and is_generating(second))
        assert httpx.post(engines, json={"count": 1}, timeout=600).status_code == 200
        run.wait(lambda: len((read(engines) or {"engines": []})["engines"]) == 1)
        assert "no other regular engine serves" in httpx.delete(f"{engines}/0", timeout=600).json()["error"]
        hold.unlink()
        finished = run.end()
    dumps = samples_of(run, finished)
    assert versions_of(dumps) == [{rollout_id} for rollout_id in range(ROLLOUTS)]
    continued = [sample for dump in dumps for sample in dump if len(sample["weight_versions"]) > 1]
    assert continued, "tokens of an engine that leaves are continued by another one"
    assert finished.output.count("its process got SIGTERM") >= 1
    assert "its process ended" not in finished.output, "no engine died"
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert examine_ledger(tmp_path / "run") == 0


def test_engines_that_die_during_rollouts_serve_again_and_nothing_is_lost(tiny_task, tmp_path):
    flags = flags_for(tiny_task, tmp_path, "--rollout-num-gpus", 2)
    hold = tmp_path / "hold"
    hold.touch()  # the first rollout goes on until the engine is back: after a step it would wait for the next sync
    with running(flags, tmp_path, "train_async.py", **COLD) as run:
        router, first, second = run.urls()
        fork_server = server_of(first).parent()
        assert fork_server.ppid() == run.process.pid, "SGLang is imported while Ray starts"
        words = [word for child in fork_server.parent().children(recursive=True) for word in child.cmdline()]
        assert any(word.endswith("raylet") for word in words)
        assert not [word for word in words if word.endswith(("monitor.py", "dashboard.py", "DashboardAgent"))], (
            "no run uses them"
        )
        run.wait(lambda: is_generating(first) and is_generating(second))
        server_of(second).kill()  # one of two: the rollout ends on the other one
        run.wait(lambda: "engine 1 serves again" in run.text())
        second = run.last_url(1)
        assert {worker["url"] for worker in read(f"{router}/workers")["workers"]} == {first, second}
        hold.write_text("1")  # and the second one until both are back
        run.wait((tmp_path / "dump" / "0.pt").exists)
        run.wait(lambda: is_generating(first) and is_generating(second))
        for engine in (first, second):  # both: the rollout waits until one serves
            scheduler_of(engine).kill()
        run.wait(lambda: len(seconds_to_recovery(run.text())) == 3)
        hold.unlink()
        finished = run.end()
    dumps = samples_of(run, finished)
    seconds = seconds_to_recovery(finished.output)
    print(f"\nseconds from noticing a death to serving again: {seconds}")
    assert finished.output.count("its process ended") == 3
    assert len(seconds) == 3
    for rollout_id, versions in enumerate(versions_of(dumps)):
        assert versions <= {rollout_id - 1, rollout_id}, "weights of the checkpoint, or older than one rollout ahead"
