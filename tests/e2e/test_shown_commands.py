"""Commands of the pages that no other run is made of: engines without a trainer, a service that makes conversations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.utils.net import free_port
from tests.doc_commands import shown_flags
from tests.e2e.running import ROOT, Finished, kill_marked, start_train

SMALL = ("--num-rollout", 1, "--rollout-batch-size", 4, "--sglang-context-length", 128)
SMALL += ("--sglang-max-total-tokens", 8192, "--fp32")


@pytest.mark.slow
def test_samples_come_from_engines_alone_and_from_a_service_as_the_pages_say(tiny_task, tmp_path: Path):
    port = free_port()
    server = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer"]
    server += [*shown_flags("docs/data.md", "rollout_buffer.buffer")[:-1], "--port", str(port)]
    dumps = {"engines": "samples/{rollout_id}.pt", "service": "conversations/{rollout_id}.pt"}
    alone = shown_flags("docs/quick_start.md", "--debug-rollout-only")
    alone += ["--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train]
    served = shown_flags("docs/data.md", "--rollout-buffer-url")
    served += ["--rollout-buffer-url", f"http://127.0.0.1:{port}"]
    flags = {"engines": alone, "service": alone + served}
    for name in ("examples", "slime_plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    started = {}
    with (tmp_path / "server.log").open("w") as log:
        service = subprocess.Popen(server, cwd=ROOT, env=os.environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        for name, words in flags.items():
            words = [*words, *SMALL, "--save-debug-rollout-data", tmp_path / dumps[name]]
            started[name] = start_train(words, tmp_path, tmp_path / f"{name}.log")
        for name, (process, mark) in started.items():
            status = process.wait(120)
            text = (tmp_path / f"{name}.log").read_text()
            assert status == 0, f"{name}:\n{text[-4000:]}\n{(tmp_path / 'server.log').read_text()[-2000:]}"
            assert Finished(status, text, mark, 0.0).survivors() == []
            samples = torch.load(str(tmp_path / dumps[name]).format(rollout_id=0), weights_only=True)["samples"]
            assert len(samples) == 16
            assert all(sample["response_length"] > 0 for sample in samples)
    finally:
        service.kill()
        service.wait()
        for process, mark in started.values():
            kill_marked(mark, "")
            process.wait(60)
