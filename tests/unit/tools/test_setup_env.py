"""Set-up: the chosen set, when it is repeated, and the messages of failures. Installs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "setup_env.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_a_gpu_torch_comes_first_and_the_engines_without_their_dependencies() -> None:
    (_, torch), (_, engines), (_, rest), (_, optional), (_, own) = setup_env.steps("cpu")
    assert torch == ["torch==2.13.0"]
    assert engines == ["--no-deps", "sglang==0.5.23", "torchvision==0.28.0", "megatron-core==0.16.1", "openenv==0.10.0"]
    assert "--no-deps" not in rest
    assert {"transformers==5.19.0", "ray[default]>=2.50", "dill", "jsonschema", "pytest>=8"} <= set(rest)
    assert optional == ["reasoning-gym==0.1.25"]
    assert own[-2:] == ["-e", str(ROOT)]


def test_with_a_gpu_the_project_is_installed_the_ordinary_way() -> None:
    assert [arguments for _, arguments in setup_env.steps("gpu")] == [["-e", f"{ROOT}[dev]"]]


def test_a_stamp_that_fits_makes_the_second_run_instant_and_silent(tmp_path: Path) -> None:
    (tmp_path / "slime-setup.stamp").write_text(setup_env.fingerprint("cpu"), encoding="utf-8")
    done = run("--venv", str(tmp_path), "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_two_sets_and_changed_requirements_have_stamps_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = setup_env.fingerprint("cpu")
    assert setup_env.fingerprint("gpu") != before
    changed = tmp_path / "cpu.txt"
    changed.write_text(setup_env.REQUIREMENTS.read_text() + "one-more\n")
    monkeypatch.setattr(setup_env, "REQUIREMENTS", changed)
    assert setup_env.fingerprint("cpu") != before


def test_a_failing_pip_shows_its_message_and_leaves_no_stamp(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'no such package'\nexit 7\n")
    python.chmod(0o755)
    done = run("--venv", str(venv), "--device", "cpu")
    assert done.returncode == 1
    assert "could not install torch (exit code 7):\nno such package" in done.stderr
    assert not (venv / "slime-setup.stamp").exists()


def test_a_package_that_cannot_be_compiled_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Path("/bin/false")
    setup_env.pip(failing, "optional", ["reasoning-gym"])
    assert "without reasoning-gym" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        setup_env.pip(failing, "torch", ["torch"])


def test_a_second_set_up_at_the_same_time_is_refused(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "slime-setup.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run("--venv", str(tmp_path), "--device", "cpu")
    assert done.returncode == 1
    assert "another set-up" in done.stderr


def test_the_pins_of_the_two_sets_agree() -> None:
    cpu = {line.strip() for line in setup_env.REQUIREMENTS.read_text().splitlines()}
    pinned = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    assert pinned == {"sglang==0.5.23", "megatron-core==0.16.1"}
    assert pinned <= cpu


@pytest.mark.parametrize(("forced", "device"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_accelerator_can_be_forced(forced: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ACCELERATOR", forced)
    assert setup_env.find_device() == device


def test_ci_calls_the_test_command_of_the_readme_and_nothing_else() -> None:
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith(("#", "set"))
    ]
    assert commands == ['cd "$(dirname "$0")/.."', "exec make test"]
    assert "make test" in (ROOT / "README.md").read_text()
