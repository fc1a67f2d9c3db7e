"""The checkpoint that a run starts from. Only files and names are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.backends.megatron_utils.arguments import CheckpointArgs
from slime.backends.training.checkpoint_files import (
    TRACKER,
    iteration_directory,
    partial_directory,
    prune,
    publish,
    write_manifest,
)
from slime.backends.training.checkpoint_source import find_reference, find_start, inspect_checkpoint
from slime.backends.training.rules import check_checkpoints
from slime.utils.errors import ConfigError
from slime.utils.files import lock_save
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
    _megatron(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert _start(load=str(tmp_path)) == ("torch_dist", f"{tmp_path}/release", "--load", 0)


@pytest.mark.parametrize("name", ["", "release"])
def test_a_release_is_no_run_to_go_on_with_but_the_first_checkpoint_of_a_run_is(name: str, tmp_path: Path) -> None:
    _megatron(tmp_path, 0)
    assert find_start(CheckpointArgs(load=str(tmp_path)), "/hf").is_training_state
    (tmp_path / "iter_0000000").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert not find_start(CheckpointArgs(load=str(tmp_path / name)), "/hf").is_training_state


def test_an_iteration_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    root = _megatron(tmp_path, 3, 7)
    with pytest.raises(ConfigError, match=r"--ckpt-step asks for iteration 5.*iter_0000003, iter_0000007"):
        _start(load=str(root), ckpt_step=5)


@pytest.mark.parametrize(
    "left", [None, [], ["rollout"], [".iter_0000000.partial", "rollout"], [f".{TRACKER}.7.partial"]]
)
def test_while_load_holds_no_checkpoint_yet_the_reference_is_the_start(left: list[str] | None, tmp_path: Path) -> None:
    load = tmp_path / "run"
    for name in left or []:
        (load / name).mkdir(parents=True)
    if left == []:
        load.mkdir()
    base = _megatron(tmp_path / "base", 4)
    expected = ("torch_dist", f"{base}/iter_0000004", "--ref-load", 4)
    assert _start(load=str(load), save=str(load), ref_load=str(base)) == expected
    assert _start(load=str(load), save=str(load)) == ("hf", "/hf", "--hf-checkpoint", 0)


def test_pretrained_weights_are_the_start_of_training_and_not_the_reference(tmp_path: Path) -> None:
    base, pretrained = _megatron(tmp_path / "base", 4), _megatron(tmp_path / "pretrained", 2)
    run = tmp_path / "run"
    flags = {"load": str(run), "save": str(run), "ref_load": str(base), "pretrained_checkpoint": str(pretrained)}
    assert _start(**flags) == ("torch_dist", f"{pretrained}/iter_0000002", "--pretrained-checkpoint", 2)
    assert find_reference(CheckpointArgs(**flags), "/hf").directory == f"{base}/iter_0000004"  # type: ignore[arg-type]
    _megatron(run, 1)
    assert _start(**flags) == ("torch_dist", f"{run}/iter_0000001", "--load", 1)
    with pytest.raises(ConfigError, match=r"--pretrained-checkpoint /nowhere does not exist or holds no checkpoint"):
        _start(pretrained_checkpoint="/nowhere")


def test_a_load_directory_that_does_not_exist_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    base = _megatron(tmp_path / "base", 4)
    for save in (None, str(tmp_path / "other")):
        with pytest.raises(ConfigError, match=f"--load {tmp_path}/typo: there is no such directory"):
            _start(load=str(tmp_path / "typo"), save=save, ref_load=str(base))


def _with_manifest(root: Path, iteration: int) -> Path:
    directory = iteration_directory(root, iteration)
    (directory / "__0_0.distcp").write_bytes(b"12345")
    write_manifest(directory, iteration, root=root, layout={}, content={})
    return directory


def test_a_torn_latest_checkpoint_gives_way_to_the_newest_complete_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _megatron(tmp_path, 3, 5, 7)
    for iteration in (3, 5, 7):
        _with_manifest(root, iteration)
    (root / "iter_0000007" / "__0_0.distcp").write_bytes(b"123")
    (root / "iter_0000005" / "__0_0.distcp").unlink()
    assert _start(load=str(root)) == ("torch_dist", f"{root}/iter_0000003", "--load", 3)
    assert "__0_0.distcp has 3 bytes instead of 5. Falling back to iter_0000003" in caplog.text
    with pytest.raises(ConfigError, match=r"--ckpt-step asks for iteration 5.*__0_0.distcp is missing.*iter_0000003"):
        _start(load=str(root), ckpt_step=5)
    with pytest.raises(ConfigError, match=r"iter_0000007 is not a complete checkpoint"):
        _start(load=str(root / "iter_0000007"))


def test_without_a_complete_checkpoint_before_it_a_torn_one_is_an_error(tmp_path: Path) -> None:
    root = _megatron(tmp_path, 7)
    (_with_manifest(root, 7) / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"names iteration 7.*manifest.json cannot be read.*Complete are: none"):
        _start(load=str(root))


def test_a_complete_checkpoint_counts_even_if_the_tracker_was_not_written_any_more(tmp_path: Path) -> None:
    root = _megatron(tmp_path, 2)
    _with_manifest(root, 2)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert _start(load=str(root), save=str(root)) == ("torch_dist", f"{root}/iter_0000002", "--load", 2)


def test_an_hf_directory_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _start(load=str(tmp_path)) == ("hf", str(tmp_path), "--load", 0)


def test_a_directory_with_other_files_is_refused_and_the_flag_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=rf"--load {tmp_path} holds neither .* such as notes.txt"):
        _start(load=str(tmp_path))


@pytest.mark.parametrize("left", ["failed_steps", "critic", "critic/failed_steps", "rollout", ".iter_0000003.partial"])
def test_what_a_run_leaves_before_its_first_checkpoint_is_complete_does_not_prevent_a_new_start(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).mkdir(parents=True)
    assert _start(load=str(tmp_path), save=str(tmp_path)) == ("hf", "/hf", "--hf-checkpoint", 0)
    assert _start(load=str(tmp_path / "critic"), save=str(tmp_path / "critic")) == ("hf", "/hf", "--hf-checkpoint", 0)


def test_a_run_starts_anew_beside_other_files_if_it_has_saved_there_before(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()  # --save-hf
    with pytest.raises(ConfigError, match="such as hf"):
        _start(load=str(tmp_path), save=str(tmp_path))
    lock_save(str(tmp_path)).close()
    assert _start(load=str(tmp_path), save=str(tmp_path)) == ("hf", "/hf", "--hf-checkpoint", 0)
    assert inspect_checkpoint("--save", str(tmp_path)) is None
    with pytest.raises(ConfigError, match="such as hf"):
        _start(load=str(tmp_path), save=str(tmp_path / "other"))


@pytest.mark.parametrize("text", ["soon", "9" * 5000, "-3", "\N{SUPERSCRIPT TWO}"], ids=["word", "digits", "-3", "2"])
def test_a_tracker_with_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ConfigError, match=f"holds '{text[:40]}'; it must be an iteration"):
        _start(load=str(tmp_path))


def test_a_reference_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ref-load"):
        find_reference(CheckpointArgs(ref_load=str(tmp_path / "none")), "/hf")


def test_the_command_line_check_reports_what_the_trainer_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (problem,) = check_checkpoints(make_args("/hf", load=str(tmp_path)))
    assert problem.startswith(f"--load {tmp_path} holds neither")
    new = str(tmp_path / "new")
    assert check_checkpoints(make_args("/hf", load=new, save=new)) == []


def test_actor_and_critic_start_from_the_same_checkpoint_whichever_was_interrupted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, critic = _megatron(tmp_path, 3, 5), _megatron(tmp_path / "critic", 3, 5, 7)  # 7: the actor's was not written
    for iteration in (3, 5, 7):
        _with_manifest(critic, iteration)  # first, as a run does
        if iteration < 7:
            _with_manifest(root, iteration)
    assert _start(load=str(root))[3] == 5
    assert _start(load=str(critic), save=str(critic))[3] == 5

    (critic / "iter_0000005" / "__0_0.distcp").write_bytes(b"12")
    assert _start(load=str(root))[3] == 3
    assert "of the critic's part critic/iter_0000005 __0_0.distcp has 2 bytes" in caplog.text
    assert _start(load=str(critic), save=str(critic))[3] == 3


def test_a_critic_starts_anew_if_the_first_checkpoint_of_its_actor_was_not_completed(tmp_path: Path) -> None:
    critic = _megatron(tmp_path / "critic", 3)
    _with_manifest(critic, 3)
    partial_directory(tmp_path, "iter_0000003").mkdir()
    assert _start(load=str(critic), save=str(critic))[3] == 3  # a critic of its own, in a folder of that name
    lock_save(str(tmp_path)).close()
    assert _start(load=str(tmp_path), save=str(tmp_path))[2] == "--hf-checkpoint"
    assert _start(load=str(critic), save=str(critic))[2] == "--hf-checkpoint"


def test_a_checkpoint_that_is_deleted_takes_the_critics_part_with_it(tmp_path: Path) -> None:
    root, critic = _megatron(tmp_path, 3, 5), _megatron(tmp_path / "critic", 3, 5)
    for iteration in (3, 5):
        _with_manifest(critic, iteration)
        _with_manifest(root, iteration)
    (root / ".iter_0000003.removed" / "half").mkdir(parents=True)  # a process died here, and the run resumed before 3
    assert prune(root, 1) == [3]
    assert not list(root.glob(".*.removed"))
    assert not (critic / "iter_0000003").exists()
    assert _start(load=str(root))[3] == _start(load=str(critic))[3] == 5


def test_what_a_process_that_died_was_writing_or_deleting_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".iter_0000001.removed" / "half").mkdir(parents=True)
    partial_directory(tmp_path, "iter_0000001").mkdir()
    for _ in range(2):  # the second replaces the first, as a run that was resumed does
        partial_directory(tmp_path, "iter_0000002").mkdir()
        assert publish(tmp_path, "iter_0000002", 2, layout={}, content={}) == []
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", "latest_checkpointed_iteration.txt"}
