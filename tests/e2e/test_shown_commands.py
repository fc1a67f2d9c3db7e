"""Commands of the pages that no other run is made of: the demo, and a service that makes conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.utils.net import free_port
from tests.doc_commands import shown_flags
from tests.e2e.running import ROOT, Finished, exit_status, kill_marked, metrics, start_train, values

SMALL = ("--num-rollout", 1, "--rollout-batch-size", 4, "--sglang-context-length", 128)
SMALL += ("--sglang-max-total-tokens", 8192, "--fp32")

SHORT = ("--cores", 1, "--warm-start-rollouts", 1, "--grpo-rollouts", 1)


@pytest.mark.slow
def test_the_demo_and_a_service_of_conversations_run_as_the_pages_say(tiny_task, tmp_path: Path):
    port = free_port()
    server = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer"]
    server += [*shown_flags("docs/data.md", "rollout_buffer.buffer")[:-1], "--port", str(port)]
    words = shown_flags("docs/en/get_started/quick_start.md", "--debug-rollout-only")
    words += ["--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train]
    words += shown_flags("docs/data.md", "--rollout-buffer-url")
    words += ["--rollout-buffer-url", f"http://127.0.0.1:{port}", *SMALL]
    words += ["--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"]
    for name in ("examples", "slime_plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    started = {}
    with (tmp_path / "server.log").open("w") as log:
        service = subprocess.Popen(server, cwd=ROOT, env=os.environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        started["service"] = start_train(words, tmp_path, tmp_path / "service.log")
        demo = [*shown_flags("examples/demo/README.md", "run_demo.py"), "--output", tmp_path / "demo", *SHORT]
        started["demo"] = start_train(demo, tmp_path, tmp_path / "demo.log", "examples/demo/run_demo.py")
        for name, (process, mark) in started.items():
            status = exit_status(process, tmp_path / f"{name}.log")
            text = (tmp_path / f"{name}.log").read_text()
            assert status == 0, f"{name}:\n{text[-4000:]}\n{(tmp_path / 'server.log').read_text()[-2000:]}"
            assert Finished(status, text, mark).survivors() == []
        samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
        assert len(samples) == 16
        assert all(sample["response_length"] > 0 for sample in samples)
        [run] = tmp_path.glob("outputs/*")
        assert len(values(metrics(run), "rollout/raw_reward")) == 1
        summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
        assert summary["max_train_rollout_logprob_abs_diff"] < 1e-5
        assert "the exported checkpoint answers: 12+34=" in (tmp_path / "demo.log").read_text()
    finally:
        service.kill()
        service.wait()
        for process, mark in started.values():
            kill_marked(mark, "")
            process.wait()
