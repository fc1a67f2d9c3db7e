"""Weights through files: hosts hold the trainer's weights after every interruption, damage, or missing file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.errors import ConfigError, DeadlineExceeded, EngineError
from slime.weight_sync import local_checkpoint, send_disk, tensor_files, version_store
from slime.weight_sync.local_checkpoint import pull
from slime.weight_sync.send_disk import DeltaUpdater, DiskSettings, DiskUpdater
from slime.weight_sync.session import ALONE, WeightUpdate
from slime.weight_sync.version_store import MANIFEST, read_manifest, version_path
from tests.unit.weight_sync.fakes import RecordingFleet, StubTrainer

UPDATE = WeightUpdate("1", max_chunk_bytes=1 << 20, timeout_s=600)


class Run:
    """A publisher, one host, and what each saw."""

    def __init__(self, tmp_path: Path, *, encoding: str = "xor", is_delta: bool = True, **settings: Any) -> None:
        self.root, self.local = tmp_path / "shared", tmp_path / "local"
        self.trainer = StubTrainer()
        self.fleet = RecordingFleet(pull_weights=self._pull, weight_version=lambda: self.fleet.version)
        self.settings = DiskSettings(self.root, self.local if is_delta else None, **settings)
        self.updater = (
            DeltaUpdater(ALONE, self.settings, encoding=encoding)  # type: ignore[arg-type]
            if is_delta
            else DiskUpdater(ALONE, self.settings)
        )

    def _pull(self, source_dir: str, local_dir: str, version: int) -> None:
        pull(Path(source_dir), Path(local_dir), version)

    def sync(self, version: int) -> int:
        self.fleet.version = str(version)
        return self.updater.update(self.fleet, self.trainer, replace(UPDATE, version=str(version)))

    def versions(self) -> list[tuple[int, bool]]:
        """(version, whether it is a delta)"""
        found = [read_manifest(path) for path in sorted(self.root.glob("weight_v*"))]
        return [(manifest.version, manifest.is_delta) for manifest in found]

    def assert_same(self, local: Path | None = None) -> None:
        held = load_file((local or self.local) / "model.safetensors")
        assert held.keys() == self.trainer.weights.keys()
        for name, tensor in self.trainer.weights.items():
            assert torch.equal(held[name], tensor), name


@pytest.fixture(params=["xor", "overwrite"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Version 0 in full, 1 and 2 as differences."""
    run = Run(tmp_path, encoding=request.param)
    run.sync(0)
    for version in (1, 2):
        run.trainer.step()
        run.sync(version)
    return run


# ------------------------------------------------------------------------------------------------------------- full


def test_a_full_version_is_a_checkpoint_that_engines_are_told_to_load(tmp_path):
    run = Run(tmp_path, is_delta=False)
    run.sync(3)
    final = version_path(run.root, 3)
    assert dict(run.fleet.calls)["update_weights_from_disk"] == {"model_path": str(final), "weight_version": "3"}
    assert "pull_weights" not in run.fleet.verbs
    assert (final / "config.json").exists()
    run.assert_same(final)
    assert not any((run.root / ".writing").iterdir())


def test_only_the_newest_version_is_kept_unless_all_are_wanted(tmp_path):
    for keeps, left in ((False, [2]), (True, [1, 2])):
        run = Run(tmp_path / str(keeps), is_delta=False, keeps_files=keeps)
        for version in (1, 2):
            run.sync(version)
        assert [version for version, _ in run.versions()] == left


_HOLD = """
import sys
from pathlib import Path
from slime.weight_sync.version_store import VersionStore
store = VersionStore(Path(sys.argv[1]))
store.open(keeps_files=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_live_runs_do_not_share_a_directory_of_versions(tmp_path, monkeypatch):
    Run(tmp_path, is_delta=False).sync(1)
    monkeypatch.setattr(version_store, "_LOCK_TIMEOUT_S", 0.0)
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "other" / "shared")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        run = Run(tmp_path / "other", is_delta=False)
        with pytest.raises(ConfigError, match=rf"--update-weight-disk-dir .*: process {other.pid} .* writes to"):
            run.sync(1)
        assert run.versions() == []
        other.kill()
        other.wait(10)
    run.sync(1)
    assert run.versions() == [(1, False)]


def test_the_same_version_again_is_loaded_but_not_written_again(tmp_path):
    run = Run(tmp_path, is_delta=False)
    assert run.sync(1) > 0
    assert run.sync(1) == 0
    assert run.trainer.num_saved == 1
    assert run.fleet.verbs.count("update_weights_from_disk") == 2


def test_weights_that_cannot_be_written_leave_the_engines_alone_and_the_last_version_whole(tmp_path):
    run = Run(tmp_path, is_delta=False)
    run.sync(1)
    run.fleet.verbs.clear()
    run.trainer.save_error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        run.sync(2)
    assert run.fleet.verbs == []
    assert run.versions() == [(1, False)]
    run.trainer.save_error = None
    run.sync(2)
    assert run.versions() == [(2, False)]


@pytest.mark.parametrize("failing", ["pause_generation", "flush_cache", "update_weights_from_disk", "weight_version"])
def test_engines_go_on_and_files_stay_when_loading_fails(tmp_path, failing):
    run = Run(tmp_path, is_delta=False)
    run.sync(1)
    answers = dict(run.fleet.answers)
    run.fleet.answers[failing] = EngineError("engine a is gone")
    with pytest.raises(EngineError, match=r"engine a is gone \(Weights are at .*weight_v000002, --update-weight-disk"):
        run.sync(2)
    assert run.fleet.verbs[-1] == "continue_generation"
    assert run.versions() == [(1, False), (2, False)]
    run.fleet.answers = answers
    run.sync(2)
    assert run.versions() == [(2, False)]


def test_a_directory_with_strangers_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "thesis.tex").write_text("years of work")
    run = Run(tmp_path, is_delta=False)
    with pytest.raises(ConfigError, match=r"--update-weight-disk-dir .* holds 'thesis.tex'"):
        run.sync(1)
    assert (tmp_path / "shared" / "thesis.tex").exists()
    assert run.fleet.verbs == []


def test_what_an_earlier_run_left_is_deleted(tmp_path):
    run = Run(tmp_path, is_delta=False)
    run.sync(8)
    (run.root / ".writing" / "weight_v000009").mkdir(parents=True)
    again = Run(tmp_path, is_delta=False)
    again.sync(1)
    assert again.versions() == [(1, False)]
    assert not any((run.root / ".writing").iterdir())


def test_the_users_function_sees_a_version_before_any_engine_and_stops_it_by_raising(tmp_path):
    seen: list[str] = []

    def note(directory: str, fleet: RecordingFleet) -> None:
        read_manifest(Path(directory))
        assert fleet.verbs == []
        seen.append(directory)
        if len(seen) == 2:
            raise RuntimeError("no upload today")

    run = Run(tmp_path, is_delta=False, post_write=note)
    run.sync(1)
    run.fleet.verbs.clear()
    with pytest.raises(RuntimeError, match="no upload today"):
        run.sync(2)
    assert seen == [str(version_path(run.root, version)) for version in (1, 2)]
    assert run.fleet.verbs == []


def test_the_content_of_a_version_depends_on_its_tensors_only(tmp_path):
    first, second = Run(tmp_path / "a", is_delta=False), Run(tmp_path / "b", is_delta=False)
    first.sync(1)
    second.sync(5)
    contents = [read_manifest(version_path(*place)).content for place in ((first.root, 1), (second.root, 5))]
    assert contents[0] == contents[1]
    second.trainer.step()
    second.sync(6)
    assert read_manifest(version_path(second.root, 6)).content != contents[0]


def test_a_version_that_lost_a_part_of_a_file_is_not_complete(tmp_path):
    run = Run(tmp_path, is_delta=False)
    run.sync(1)
    file = version_path(run.root, 1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(EngineError, match=r"model.safetensors has .* bytes instead of"):
        read_manifest(version_path(run.root, 1))


# ------------------------------------------------------------------------------------------------------------- delta


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8 + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"[1]",
        (11).to_bytes(8, "little") + b'{"a": null}',
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (30).to_bytes(8, "little") + b'{"a": {"data_offsets":[2, 1]}}' + b"1234",
        (30).to_bytes(8, "little") + b'{"a": {"data_offsets":[0, 9]}}' + b"1234",
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors is not a complete safetensors file"):
        tensor_files.spans_of(tmp_path)


def test_the_first_version_is_the_real_weights_and_the_others_are_small(run):
    assert run.versions() == [(0, False), (1, True), (2, True)]
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in sorted(run.root.glob("weight_v*"))]
    assert max(sizes[1:]) < sizes[0] / 8
    assert list(read_manifest(version_path(run.root, 2)).tensors) == ["layers.0.weight"]
    run.assert_same()
    assert dict(run.fleet.calls)["update_weights_from_disk"]["model_path"] == str(run.local)


def test_hosts_follow_before_engines_pause(run):
    verbs = run.fleet.verbs
    assert verbs.index("pull_weights") < verbs.index("pause_generation")


def test_a_host_that_comes_later_replays_the_chain(run, tmp_path):
    pull(run.root, tmp_path / "late", 2)
    run.assert_same(tmp_path / "late")


def test_pulling_a_version_that_is_there_changes_nothing(run):
    before = (run.local / "model.safetensors").stat().st_mtime_ns
    pull(run.root, run.local, 2)
    assert (run.local / "model.safetensors").stat().st_mtime_ns == before


def test_two_engines_of_one_host_pull_at_once(run):
    run.trainer.step()
    run.sync(3)
    shutil.rmtree(run.local)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: pull(run.root, run.local, 3), range(2)))
    run.assert_same()


def test_a_kernel_that_cannot_populate_pages_makes_no_difference(run, monkeypatch):
    monkeypatch.setattr(tensor_files, "_POPULATE_WRITE", 9999)
    run.trainer.step()
    run.sync(3)
    run.assert_same()


def test_a_copy_whose_change_was_interrupted_is_made_afresh(run, monkeypatch):
    """Applying xor a second time would bring the old bytes back."""
    run.trainer.step()

    def die(*arguments: Any) -> None:
        local_checkpoint_compare(*arguments)
        raise KeyboardInterrupt

    local_checkpoint_compare = local_checkpoint._compare
    with monkeypatch.context() as patch:
        patch.setattr(local_checkpoint, "_compare", die)
        with pytest.raises(KeyboardInterrupt):
            run.sync(3)
    assert json.loads((run.local / ".weight_sync" / "state.json").read_text())["is_whole"] is False
    pull(run.root, run.local, 3)
    run.assert_same()


def test_bytes_that_somebody_changed_in_the_copy_are_noticed_and_made_good(run):
    file = run.local / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little") + 8
    data[header + 40] ^= 255  # in layers.0.weight, which the next version changes
    file.write_bytes(data)
    run.trainer.step()
    run.sync(3)
    assert run.versions()[-1] == (3, True)
    run.assert_same()


@pytest.mark.parametrize("field", ["boot", "lineage"])
def test_a_copy_from_before_a_restart_of_the_host_or_of_another_run_is_not_trusted(run, field):
    state_file, weights = run.local / ".weight_sync" / "state.json", run.local / "model.safetensors"
    weights.write_bytes(version_path(run.root, 0).joinpath("model.safetensors").read_bytes())
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {field: "another"}))
    pull(run.root, run.local, 2)
    run.assert_same()


def test_files_that_do_not_belong_to_the_version_leave_a_fresh_copy(run):
    (run.local / ".weight_sync" / "state.json").unlink()
    (run.local / "old.safetensors").write_bytes(b"")
    pull(run.root, run.local, 2)
    assert not (run.local / "old.safetensors").exists()
    run.assert_same()


def test_a_local_directory_with_strangers_in_it_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"--update-weight-local-checkpoint-dir .* holds 'config.json'"):
        pull(run.root, tmp_path / "model", 2)
    assert (tmp_path / "model" / "config.json").read_text() == "mine"


@pytest.mark.parametrize("damage", ["missing", "torn", "manifest"])
def test_a_delta_that_is_missing_or_torn_is_answered_with_a_full_version(run, damage):
    folder = version_path(run.root, 2)
    shutil.rmtree(run.local)  # a new host, which needs the whole chain
    match damage:
        case "missing":
            shutil.rmtree(folder)
        case "torn":
            file = folder / "delta-00000.safetensors"
            data = bytearray(file.read_bytes())
            data[-4:] = bytes(4)
            file.write_bytes(data)
        case _:
            (folder / MANIFEST).write_text("{")
    run.trainer.step()
    run.sync(3)
    assert run.versions() == [(3, False)]
    run.assert_same()
    run.trainer.step()
    run.sync(4)
    assert run.versions() == [(3, False), (4, True)]
    run.assert_same()


def test_a_change_that_did_not_reach_the_files_is_in_the_next_version(run, monkeypatch):
    run.trainer.step()
    with monkeypatch.context() as patch:
        patch.setattr(send_disk, "save_file", _fail)
        with pytest.raises(OSError, match="disk full"):
            run.sync(3)
    assert run.fleet.verbs.count("pull_weights") == 3
    run.trainer.step("layers.1.weight")
    run.sync(4)
    assert run.versions() == [(4, False)]
    run.assert_same()


def _fail(*arguments: Any) -> None:
    raise OSError("disk full")


def test_a_version_without_changes_is_still_a_version(run):
    run.sync(3)
    assert read_manifest(version_path(run.root, 3)).tensors == {}
    assert run.fleet.version == "3"
    run.assert_same()


def test_a_long_chain_is_begun_anew_and_what_came_before_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(send_disk, "_MAX_DELTAS", 2)
    run = Run(tmp_path)
    for version in range(5):
        run.trainer.step(count=1)
        run.sync(version)
        run.assert_same()
    assert run.versions() == [(3, False), (4, True)]


def test_deltas_that_together_are_as_large_as_everything_are_followed_by_a_full_version(tmp_path):
    run = Run(tmp_path)
    for version in range(4):
        for name in run.trainer.weights:
            run.trainer.weights[name].normal_(generator=run.trainer.generator)
        run.sync(version)
        run.assert_same()
    assert [is_delta for _, is_delta in run.versions()] in ([False], [False, True])
    assert run.trainer.num_saved == 2


def test_a_host_that_cannot_take_a_full_version_either_is_an_error_before_engines_pause(run):
    run.fleet.answers["pull_weights"] = EngineError("read-only file system")
    run.fleet.verbs.clear()
    run.trainer.step()
    with pytest.raises(EngineError, match="read-only file system"):
        run.sync(3)
    assert set(run.fleet.verbs) == {"pull_weights"}


def test_a_copy_that_another_engine_never_lets_go_of_is_an_error(run):
    import fcntl

    with (run.local / ".weight_sync" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match=r"lock .* of another engine"):
            pull(run.root, run.local, 2, timeout_s=0.1)


@pytest.mark.parametrize("name", ["xxh3-128", "adler32", "blake3"])
def test_every_checksum_finds_a_changed_byte(tmp_path, name):
    if name == "blake3":
        pytest.importorskip("blake3")
    run = Run(tmp_path, checksum=name)
    run.sync(0)
    file = version_path(run.root, 0) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineError, match="1 of 3 tensors do not have the checksums"):
        pull(run.root, tmp_path / "late", 0)
