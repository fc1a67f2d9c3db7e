"""Which checkpoint a run starts from. Only files and names are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.backends.megatron_utils.arguments import CheckpointArgs
from slime.backends.megatron_utils.checkpoint_source import check_checkpoints, find_reference, find_start
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_trainer import make_args


def _megatron(root: Path, *iterations: int) -> Path:
    for iteration in iterations:
        directory = root / f"iter_{iteration:07d}"
        directory.mkdir(parents=True)
        (directory / "metadata.json").write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))
    return root


def _start(**flags: object) -> tuple[str, str, str, int]:
    source = find_start(CheckpointArgs(**flags), "/hf")  # type: ignore[arg-type]
    return source.format, source.directory, source.flag, source.iteration


def test_without_load_the_run_starts_from_the_hf_checkpoint() -> None:
    assert _start() == ("hf", "/hf", "--hf-checkpoint", 0)


def test_load_takes_the_latest_or_the_requested_iteration(tmp_path: Path) -> None:
    root = _megatron(tmp_path, 3, 7)
    assert _start(load=str(root)) == ("torch_dist", f"{root}/iter_0000007", "--load", 7)
    assert _start(load=str(root), ckpt_step=3) == ("torch_dist", f"{root}/iter_0000003", "--load", 3)
    assert _start(load=f"{root}/iter_0000003") == ("torch_dist", f"{root}/iter_0000003", "--load", 3)


def test_a_release_checkpoint_counts_as_iteration_zero(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert _start(load=str(tmp_path)) == ("torch_dist", f"{tmp_path}/release", "--load", 0)


def test_an_iteration_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    root = _megatron(tmp_path, 3, 7)
    with pytest.raises(ConfigError, match=r"--ckpt-step asks for iteration 5.*iter_0000003, iter_0000007"):
        _start(load=str(root), ckpt_step=5)


@pytest.mark.parametrize("left", [None, [], ["rollout"], [".iter_0000000.partial", "rollout"]])
def test_while_load_holds_no_checkpoint_yet_the_reference_is_the_start(left: list[str] | None, tmp_path: Path) -> None:
    load = tmp_path / "run"
    for name in left or []:
        (load / name).mkdir(parents=True)
    if left == []:
        load.mkdir()
    base = _megatron(tmp_path / "base", 4)
    assert _start(load=str(load), ref_load=str(base)) == ("torch_dist", f"{base}/iter_0000004", "--ref-load", 4)
    assert _start(load=str(load)) == ("hf", "/hf", "--hf-checkpoint", 0)


def test_an_hf_directory_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _start(load=str(tmp_path)) == ("hf", str(tmp_path), "--load", 0)


def test_a_directory_with_other_files_is_refused_and_the_flag_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=rf"--load {tmp_path} holds neither .* such as notes.txt"):
        _start(load=str(tmp_path))


def test_a_tracker_with_nonsense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(ConfigError, match="holds 'soon'"):
        _start(load=str(tmp_path))


def test_a_reference_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ref-load"):
        find_reference(CheckpointArgs(ref_load=str(tmp_path / "none")), "/hf")


def test_the_command_line_check_reports_what_the_trainer_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (problem,) = check_checkpoints(make_args("/hf", load=str(tmp_path)))
    assert problem.startswith(f"--load {tmp_path} holds neither")
    assert check_checkpoints(make_args("/hf", load=str(tmp_path / "new"))) == []
