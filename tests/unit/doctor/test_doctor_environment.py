"""Each check of the machine, made to fail."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slime.config.plan import devices
from slime.doctor import Finding, Situation, command_checks, machine_checks
from tests.unit.config.plan_args import plan_args
from tools.make_tiny_task import TinyTask

NOTHING = Situation()


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_an_old_python_fails() -> None:
    assert only(machine_checks.python_version(NOTHING, (3, 10, 4))).status == "fail"
    assert only(machine_checks.python_version(NOTHING, (3, 12, 1))).status == "ok"


def test_a_missing_and_an_outdated_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["ray>=999", "no-such-package-here", "pytest ; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    old, missing, rest = machine_checks.packages(NOTHING)
    assert (old.status, missing.status, rest.status) == ("fail", "fail", "ok")
    assert "supported is >=999" in old.value
    assert missing.fix.startswith("pip install 'no-such-package-here'")


def test_the_installed_packages_fit() -> None:
    assert {finding.status for finding in machine_checks.packages(NOTHING)} == {"ok"}


def test_cuda_mode_without_a_driver_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "_DRIVERS", (tmp_path / "none",))
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(name="cuda"))
    assert only(machine_checks.device(NOTHING)).status == "fail"


def test_cpu_mode_beside_a_driver_is_pointed_out_unless_it_is_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "_DRIVERS", (tmp_path / "version",))
    (tmp_path / "version").touch()
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(name="cpu"))
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    assert only(machine_checks.device(NOTHING)).status == "warn"
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    assert only(machine_checks.device(NOTHING)).status == "ok"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, an adapter and everything that they need. Tests take one thing away."""
    files = {
        "version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:19:43 UTC 2025\n",
        "torch/version.py": "cuda: Optional[str] = '13.0'\n",
        "adapters/mlx5_0/x": "",
        "dev/uverbs0": "",
        "lib/libmlx5-rdmav34.so": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine_checks, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine_checks, "_COMPATIBILITY", tmp_path / "compat")
    monkeypatch.setattr(machine_checks, "_ADAPTERS", tmp_path / "adapters")
    monkeypatch.setattr(machine_checks, "_VERBS", tmp_path / "dev")
    monkeypatch.setattr(machine_checks, "_PROVIDERS", (f"{tmp_path}/lib/*.so",))
    origin = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(machine_checks.importlib.util, "find_spec", lambda name: origin)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    return tmp_path


def test_a_machine_with_a_gpu_and_an_adapter_is_right(gpu: Path) -> None:
    assert only(machine_checks.driver(NOTHING)).status == "ok"
    assert only(machine_checks.infiniband(NOTHING)).status == "ok"


def test_a_driver_that_is_older_than_torch_s_cuda_fails(gpu: Path) -> None:
    (gpu / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.12  Release Build\n")
    finding = only(machine_checks.driver(NOTHING))
    assert finding.status == "fail"
    assert finding.value == "570.12, torch is built for CUDA 13.0, which needs 580 or newer"
    (gpu / "compat").touch()
    assert only(machine_checks.driver(NOTHING)).status == "warn"
    (gpu / "version").unlink()
    assert list(machine_checks.driver(NOTHING)) == []


def test_an_adapter_without_driver_library_device_or_locked_memory_fails(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpu / "lib" / "libmlx5-rdmav34.so").unlink()
    finding = only(machine_checks.infiniband(NOTHING))
    assert finding.status == "fail"
    assert "ibverbs-providers" in finding.fix
    (gpu / "dev" / "uverbs0").unlink()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (65536, 65536))
    monkeypatch.setattr(machine_checks, "_CAP_IPC_LOCK", 0)
    findings = list(machine_checks.infiniband(NOTHING))
    assert [finding.status for finding in findings] == ["fail"] * 3
    assert "--device=" in findings[0].fix
    assert "may lock 64 KiB only" in findings[2].value
    (gpu / "adapters" / "mlx5_0" / "x").unlink()
    (gpu / "adapters" / "mlx5_0").rmdir()
    assert list(machine_checks.infiniband(NOTHING)) == []


def test_kernels_that_are_too_new_fail_and_missing_ones_are_named_if_the_model_uses_them(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"transformer-engine": "2.20.2", "flash-linear-attention": "0.4.2", "megatron-core": "0.16.1"}
    monkeypatch.setattr(machine_checks, "_version", lambda name: versions.get(name, "missing"))
    findings = {finding.value.split()[0]: finding for finding in machine_checks.kernels(NOTHING)}
    assert findings["flash-linear-attention"].status == "ok"
    engine = findings["transformer-engine"]
    assert (engine.status, "supports" in engine.value) == ("fail", True)
    assert "'transformer-engine[core_cu13,pytorch]<2.12.0,>=2.9.0a0'" in engine.fix
    versions.clear()
    assert list(machine_checks.kernels(NOTHING)) == []
    args = plan_args(debug_rollout_only=False, transformer_impl="transformer_engine", qwen_gdn_backend="fla")
    monkeypatch.setattr(machine_checks, "read_shape", lambda args: SimpleNamespace(delta_net=object()))
    missing = list(machine_checks.kernels(Situation(args)))
    assert sorted(finding.value.split()[0] for finding in missing) == ["flash-linear-attention", "transformer-engine"]
    assert {finding.status for finding in missing} == {"warn"}


def test_a_host_name_that_other_nodes_cannot_reach_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    several = Situation(plan_args(world_size=16))
    assert list(machine_checks.host_name(several)) == [], "without GPUs all slots are on this host"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    finding = only(machine_checks.host_name(several))
    assert finding.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in finding.fix
    assert list(machine_checks.host_name(Situation(plan_args()))) == []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert list(machine_checks.host_name(several)) == []
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    assert only(machine_checks.host_name(several)).status == "ok"


def test_a_model_that_exceeds_the_memory_of_a_machine_without_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(is_cpu=True))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert only(machine_checks.memory(Situation(plan_args()))).status == "fail"
    assert only(machine_checks.memory(NOTHING)).status == "ok"


@pytest.mark.parametrize(("num_ranks", "status"), [(1, "ok"), (3, "ok"), (4, "warn"), (8, "warn")])
def test_ranks_that_slow_each_other_down_are_a_warning(
    num_ranks: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(is_cpu=True))
    monkeypatch.setattr(machine_checks, "num_cpus", lambda: 2)
    flags = {"world_size": num_ranks, "actor_num_nodes": 1, "actor_num_gpus_per_node": num_ranks}
    args = plan_args(**flags, rollout_num_gpus=1, rollout_num_gpus_per_engine=1)
    finding = only(machine_checks.processors(Situation(args)))
    assert (finding.status, finding.value) == (status, f"2 for {num_ranks} trainer ranks and 1 engine devices")
    assert list(machine_checks.processors(NOTHING)) == []


def test_a_node_that_cannot_hold_the_optimizer_of_its_ranks_fails(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = plan_args(optimizer_cpu_offload=True, async_save=True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    finding = only(machine_checks.memory(Situation(args)))
    assert finding.status == "fail"
    assert machine_checks._host_bytes(Situation(args)) > machine_checks._host_bytes(
        Situation(plan_args(async_save=True))
    )


def test_the_memory_of_a_tiny_run_on_a_cpu_is_that_of_its_processes(
    monkeypatch: pytest.MonkeyPatch, tiny_task: TinyTask
) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(is_cpu=True))
    flags = {"hf_checkpoint": str(tiny_task.model), "world_size": 1, "rollout_num_gpus": 1}
    flags |= {"actor_num_nodes": 1, "actor_num_gpus_per_node": 1, "rollout_num_gpus_per_engine": 1}
    one = machine_checks._host_bytes(Situation(plan_args(**flags)))
    assert 2.2 < one / 2**30 < 3.2, "measured: 2.4 GiB shared pages counted once"
    two = flags | {"world_size": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}
    assert 0.5 < (machine_checks._host_bytes(Situation(plan_args(**two))) - one) / 2**30 < 1.5


def test_a_trainer_process_is_as_large_as_the_doctor_assumes() -> None:
    megatron = "from slime.backends.megatron_utils.patches import install; install()"
    code = "import psutil, transformers, slime.ray.train_actor; print(psutil.Process().memory_full_info().uss)"
    done = subprocess.run(
        [sys.executable, "-c", f"{megatron}; {code}"], capture_output=True, text=True, timeout=300, check=True
    )
    assert 0.4 < int(done.stdout) / devices._RANK_BYTES < 2


def test_few_open_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    finding = only(machine_checks.open_files(NOTHING))
    assert finding.status == "fail"
    assert "ulimit -n" in finding.fix


def test_a_small_shared_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.accelerator, "current", lambda: SimpleNamespace(is_cpu=True))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    finding = only(machine_checks.shared_memory(NOTHING))
    assert finding.status == "fail"
    assert "--shm-size=1GB" in finding.fix


def test_a_machine_without_shared_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_checks, "_SHM", tmp_path / "none")
    assert only(machine_checks.shared_memory(NOTHING)).status == "fail"


def test_too_few_free_ports_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "is_port_free", lambda host, port: False)
    assert only(machine_checks.ports(NOTHING)).status == "fail"


def test_a_router_port_in_use_fails() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        args = Namespace(sglang_router_port=port, sglang_router_ip=None, rollout_num_gpus=1)
        _, router = machine_checks.ports(Situation(args))
    assert router.status == "fail"
    assert str(port) in router.value


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    args = plan_args(save=str(tmp_path / "not" / "there" / "yet"), output_dir=str(tmp_path))
    finding = only(command_checks.disk_space(Situation(args)))
    assert finding.status == "fail"
    assert str(tmp_path) in finding.value


def test_a_place_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert only(command_checks.disk_space(Situation(plan_args(output_dir=str(tmp_path))))).status == "fail"


def test_a_place_that_the_command_line_check_has_named_is_not_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    args = plan_args(output_dir=str(tmp_path), save=str(tmp_path / "run"))
    problem = f"--save {tmp_path}/run: {tmp_path} cannot be written: name another directory, or change its rights."
    assert list(command_checks.disk_space(Situation(args, problems=(problem,)))) == []


def test_slow_checks_run_only_when_they_are_asked_for() -> None:
    assert list(machine_checks.imports(NOTHING)) == list(machine_checks.device_works(NOTHING)) == []


def test_a_package_that_does_not_import_fails() -> None:
    deep = Situation(is_deep=True)
    good, bad = machine_checks.imports(deep, ("json", "no_such_module_here"))
    assert (good.status, bad.status) == ("ok", "fail")
    assert "no_such_module_here" in bad.value


def test_a_device_that_does_not_compute_fails() -> None:
    finding = only(machine_checks.device_works(Situation(is_deep=True), "raise SystemExit('CUDA error: no device')"))
    assert finding.status == "fail"
    assert "CUDA error" in finding.value
