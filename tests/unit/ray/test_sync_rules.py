"""Flags about weights in files that contradict each other, and those that do nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.tiny_command import TinyCommand, make_command

DISK = ("--update-weight-transport", "disk", "--update-weight-disk-dir", "{dir}/shared")


@pytest.fixture
def command(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


def test_weights_through_files_in_full_and_as_differences_are_allowed(command: TinyCommand) -> None:
    args = command.resolve(*DISK)
    assert not args.update_weight_local_checkpoint_dir
    delta = ("--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "relative")
    args = command.resolve(*DISK, *delta)
    assert args.update_weight_local_checkpoint_dir == str(Path("relative").absolute())


@pytest.mark.parametrize("local", ["{dir}/shared", "{dir}/shared/local", "{dir}"])
def test_a_copy_inside_the_shared_directory_or_around_it_is_refused(command: TinyCommand, local: str) -> None:
    _, problems = command.run(*DISK, "--update-weight-local-checkpoint-dir", local)
    copy = f"--update-weight-local-checkpoint-dir {local.replace('{dir}', str(command.directory))}"
    shared = f"--update-weight-disk-dir {command.directory}/shared"
    joins = ("and", "contains")
    assert any(f"{a} {join} {b}" in problems for a, b in ((copy, shared), (shared, copy)) for join in joins)


@pytest.mark.parametrize(
    "flags",
    [
        ("--update-weight-disk-dir", "{dir}/shared"),
        ("--update-weight-disk-keep-files",),
        ("--update-weight-local-checkpoint-dir", "{dir}/local"),
        ("--update-weight-delta-checksum", "adler32"),
    ],
)
def test_flags_of_files_are_idle_when_weights_go_over_the_network(command: TinyCommand, flags: tuple[str, ...]) -> None:
    assert f"{flags[0]}: no effect" in command.warnings(*flags)
    assert flags[0] not in command.warnings(*DISK, *flags)


def test_the_form_of_a_delta_is_idle_when_everything_is_sent(command: TinyCommand) -> None:
    encoding = ("--update-weight-delta-encoding", "overwrite")
    assert "--update-weight-delta-encoding: no effect" in command.warnings(*DISK, *encoding)


def test_a_checksum_without_its_library_is_refused_before_anything_starts(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "blake3" else find(name, *more)
    )
    _, problems = command.run(*DISK, "--update-weight-delta-checksum", "blake3")
    assert "pip install blake3" in problems


def _quantised(command: TinyCommand, tmp_path: Path, config: dict[str, Any]) -> None:
    path = Path(command.resolve().hf_checkpoint) / "config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": config}
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_checkpoint_in_a_format_that_cannot_be_sent_is_refused(command: TinyCommand, tmp_path: Path) -> None:
    _quantised(command, tmp_path, {"quant_method": "awq"})
    _, problems = command.run()
    assert "quant_method awq, in which weights cannot be sent" in problems
    _, problems = command.run("--debug-train-only")
    assert "awq" not in problems


def test_a_checkpoint_in_a_format_that_can_be_sent_is_allowed(command: TinyCommand, tmp_path: Path) -> None:
    _quantised(command, tmp_path, {"quant_method": "fp8"})
    assert command.resolve()
    _, problems = command.run("--check-weight-update-equal")
    assert "engines repack such weights" in problems


def test_quantisation_inside_the_engine_is_refused_unless_sglang_can_load_into_it(command: TinyCommand) -> None:
    _, problems = command.run("--sglang-quantization", "fp8")
    assert "--sglang-quantization fp8 does not work" in problems
    _, problems = command.run("--sglang-quantization", "fp8", "--sglang-load-format", "flash_rl")
    assert "does not work" not in problems


def test_growing_segments_are_told_of_where_engines_open_the_trainers_memory(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in command.warnings("--colocate")
    assert "expandable_segments" not in command.warnings()
    assert "expandable_segments" not in command.warnings("--colocate", *DISK)
    other = ("--train-env-vars", '{"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}')
    assert "expandable_segments" not in command.warnings("--colocate", *other)
