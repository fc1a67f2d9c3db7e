"""``slime doctor --gpu --small`` on a CPU, as on a machine without Ray, SGLang and their requirements."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.cli import main
from slime.doctor import gpu_check, gpu_kernels
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator

ROOT = Path(__file__).parents[3]
BARE = Path(__file__).parent / "bare_machine"

NEEDS_CUDA = {
    "environment.device",
    "attention.varlen_kernel",
    "ipc.cuda_handle",
    "offload.communicators",
    "offload.memory",
    "offload.speed",
    "save.memory",  # few weights, too
    "speed.dense",
    "moe_speed.busy",
    "payload.speed",
    "optimizer.speed",
    *(f"parity.{model}.cuda" for model in ("dense", "moe", "mla", "hybrid")),
    *(f"transformer_engine.{model}" for model in ("dense", "moe", "mla", "hybrid")),
}


def on_bare_machine(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{BARE}:{ROOT}", "SLIME_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def test_all_sections_run_small_with_torch_and_megatron_alone_and_skip_what_needs_cuda() -> None:
    done = on_bare_machine("-m", "slime", "doctor", "--gpu", "--small", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if line["status"] == "fail"] == []
    assert done.returncode == 0, done.stderr
    assert {line["check"].partition(".")[0] for line in lines} == set(gpu_check.SECTIONS)
    assert {line["check"] for line in lines if line["status"] == "skipped"} == {*NEEDS_CUDA, "save.bits"}
    assert all(line["reason"] for line in lines)


def test_a_checkpoint_is_read_by_another_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))  # as a shell inside of a job may have it
    statuses = {line["check"]: line["status"] for line in gpu_check.run_sections(["save"], is_small=True)}
    assert statuses == {"save.bits": "pass", "save.memory": "skipped"}


@pytest.mark.parametrize("package", ["ray", "sglang", "httpx", "transformers", "xxhash", "zstandard", "rich"])
def test_the_bare_machine_lacks(package: str) -> None:
    assert f"No module named '{package}'" in on_bare_machine("-c", f"import {package}").stderr


def results_of(section: Any) -> dict[str, str]:
    return {result.check: result.status for result in section(True)}


def test_attention_that_is_off_by_a_thousandth_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_kernels.packed_attention
    monkeypatch.setattr(gpu_kernels, "packed_attention", lambda *given, **named: 1.001 * right(*given, **named))
    assert results_of(gpu_kernels.attention)["attention.padded"] == "fail"


def test_log_probs_that_copy_all_logits_fail_by_memory_and_not_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_kernels.log_probs_and_entropy

    def copying(logits: torch.Tensor, *given: Any, **named: Any) -> Any:
        return right(logits.float(), *given, **named)

    monkeypatch.setattr(gpu_kernels, "log_probs_and_entropy", copying)
    statuses = results_of(gpu_kernels.logprobs)
    assert statuses["logprobs.memory"] == "fail"
    assert statuses["logprobs.values"] == "pass"


@pytest.mark.parametrize(("is_good", "status"), [(True, "pass"), (False, "fail")])
def test_a_rule_for_cuda_is_judged_there_alone(is_good: bool, status: str) -> None:
    try:
        accelerator.set_accelerator(CUDAAccelerator())
        assert gpu_kernels.judged_on_cuda("name", lambda: is_good, "rule", {}).status == status
        accelerator.set_accelerator(CPUAccelerator())
        assert gpu_kernels.judged_on_cuda("name", lambda: is_good, "rule", {}).status == "skipped"
    finally:
        accelerator.reset_accelerator()


def test_after_a_section_that_raises_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(is_small: bool) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "watch_owner", lambda: None)
    monkeypatch.setattr(gpu_kernels, "attention", broken)
    path = tmp_path / "lines"
    gpu_check._run(["attention", "environment"], str(path), is_small=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    statuses = {line["check"]: line["status"] for line in lines if "check" in line}
    assert statuses["attention.section"] == "fail"
    assert statuses["environment.packages"] == "pass"
    assert "out of memory" in next(line["reason"] for line in lines if line.get("check") == "attention.section")


def test_a_section_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = gpu_check.run_sections(["environment"], is_small=True, limit_s=0)
    assert (line["check"], line["status"]) == ("environment.section", "fail")
    assert "took longer than 0 s" in line["reason"]


def test_the_exit_status_and_the_last_line_count_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"check": "a.b", "status": "fail", "reason": "a rule", "figures": {"x": 1}}
    monkeypatch.setattr(gpu_check, "run_sections", lambda *given, **named: [line])
    out = io.StringIO()
    assert gpu_check.gpu_check(["--small"], out) == 1
    assert out.getvalue() == 'FAIL  a.b: a rule\n      {"x": 1}\n\n0 ok, 0 skipped, 1 failed\n'


def test_an_unknown_section_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--gpu", "--only", "attention,atention"])
    assert re.search(r"--only atention: unknown\. The sections are environment, attention, ", capsys.readouterr().err)
