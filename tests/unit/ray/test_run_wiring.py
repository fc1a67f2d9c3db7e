"""State that the loop and its actors keep, and pass from one step to the next."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends import TrainReport
from slime.config.arguments import SyncArgs
from slime.config.groups import RunConfig, from_args
from slime.data.dump_file import save_debug_rollout_data
from slime.data.sample import Sample
from slime.models.cost import forward_flops
from slime.ray import actor_group, train_actor
from slime.ray import rollout as rollout_module
from slime.ray.engines import recovery
from slime.ray.rollout import RolloutManager
from slime.ray.run import loop, start
from slime.ray.shards import Box, RolloutResult
from slime.ray.train_actor import SyncReport, TrainActor
from slime.ray.weight_updater import root_proof, weight_updater
from slime.rollout.rules import FULLY_ASYNC
from slime.utils.errors import ConfigError, EngineError
from tests.unit.config.tiny_command import make_command
from tests.unit.ray.runs import Engines, make_run


def test_the_state_of_the_data_is_saved_with_every_rollout_that_a_checkpoint_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[bool] = []

    def generate(rollout_id: int, saves_state: bool, version: str) -> RolloutResult:
        saved.append(saves_state)
        assert version == "3"
        return RolloutResult([], {})

    monkeypatch.setattr(loop, "get", lambda ref, *arguments: ref)
    monkeypatch.setattr(recovery, "get", lambda ref, *arguments, **more: ref)
    manager = SimpleNamespace(generate=SimpleNamespace(remote=generate))
    trainer = SimpleNamespace(update_weights=lambda *arguments: SyncReport())
    run = make_run(
        args={"save_interval": 2, "is_async": True},
        manager=manager,
        rollout_ids=range(5),
        engines=Engines(),
        trainer=trainer,
    )
    run.sync_weights(3)
    results = [run.generate(rollout_id) for rollout_id in range(5)]
    assert saved == [False, True, False, True, True]
    assert {(result.version, result.oldest_version) for result in results} == {("3", "3")}


def test_a_rollout_counts_as_trained_when_the_journal_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(loop, "get", lambda ref, *arguments: ref)
    manager = SimpleNamespace(await_journal=SimpleNamespace(remote=lambda number: order.append(f"journal {number}")))
    buffer = SimpleNamespace(trained=lambda number: order.append(f"counted {number}"))
    trainer = SimpleNamespace(train=lambda number, *arguments: order.append(f"trained {number}"))
    handles = {"trainer": trainer, "manager": manager, "data_buffer": buffer}
    make_run(**handles, has_journal=True).train(3, RolloutResult([], {}))
    assert order == ["trained 3", "journal 3", "counted 3"]
    order.clear()
    make_run(**handles).train(3, RolloutResult([], {}))  # without a journal the manager is not asked
    assert order == ["trained 3", "counted 3"]


def test_an_engine_that_waits_gets_weights_only_while_the_trainer_has_those_that_serve() -> None:
    sent: list[str] = []

    def update_weights(fleet: Any, version: str) -> SyncReport:
        sent.append(version)
        return SyncReport(0.0, 0)

    trainer = SimpleNamespace(update_weights=update_weights, train=lambda *arguments: TrainReport())
    engines = Engines()
    run = make_run(args={"is_async": True}, trainer=trainer, engines=engines, rollout_ids=range(3, 9))
    waiting: Any = object()
    run.sync_weights(3)
    assert run._send_current_weights(waiting, 1)
    run.train(3, RolloutResult([], {}))
    assert not run._send_current_weights(waiting, 1)
    run.sync_weights(4)
    assert run._send_current_weights(waiting, 1)
    assert sent == ["3", "3", "4", "4"]


def test_ranks_that_would_start_with_different_rollouts_are_refused() -> None:
    args = start.StartArgs(load="/checkpoints")
    assert start._start_id(args, [4, 4]) == 4
    with pytest.raises(ConfigError, match=r"--load /checkpoints: ranks would start at different rollouts: \[3, 4\]"):
        start._start_id(args, [4, 3])


def test_the_trainer_has_the_values_of_its_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text("megatron: [{role: actor, overrides: {lr: 0.5}}]")
    seen: list[Any] = []

    def group(args: Namespace, *more: Any) -> Any:
        seen.append(args)
        return SimpleNamespace(start_setup=lambda with_ref: [])

    monkeypatch.setattr(actor_group, "RayTrainGroup", group)
    args = make_command(tmp_path).resolve("--megatron-config-path", str(file))
    actor_group.start_trainers(RunConfig.of(args), None, [])  # type: ignore[arg-type]
    assert [of_role.lr for of_role in seen] == [0.5]
    assert args.lr != 0.5


def test_values_of_the_critic_and_kl_of_the_policy_reach_the_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_actor.ray, "get", lambda ref, timeout: ref)
    monkeypatch.setattr(train_actor, "boxed", lambda parts: [Box(part) for part in parts])
    monkeypatch.setattr(TrainActor, "_batch", lambda self, *arguments: {"tokens": []})
    rank = object.__new__(TrainActor)
    rank._rank, rank._args = 1, SimpleNamespace(train_timeout=1.0, kl_coef=0.5)
    rank._trainer = SimpleNamespace(
        train=lambda rollout_id, batch: batch["values"],
        reward_kl=lambda rollout_id, batch: "kl of rank 1",
        train_values=lambda rollout_id, batch: (batch, "values of rank 1"),
    )
    assert rank.train(0, [], None, [Box("of rank 0"), Box("of rank 1")]) == "of rank 1"
    kl = rank.reward_kl(0, [], None)
    seen, values = rank.train_values(0, [], None, [Box({}), kl])
    assert seen == {"tokens": [], "kl": "kl of rank 1", "kl_coef": 0.5}
    assert values == Box("values of rank 1")


def make_manager(directory: Path, *flags: str) -> RolloutManager:
    """A started one without engines, that replays a dump of three samples for steps of two."""
    dump = str(directory / "dump_{rollout_id}.pt")
    samples = [
        Sample(group_index=0, index=i, rollout_id=i, tokens=[5, 6], response_length=1, reward=float(i))
        for i in (0, 1, 2)
    ]
    save_debug_rollout_data(dump, samples, rollout_id=0, evaluation=False)
    flags = ("--load-debug-rollout-data", dump, "--output-dir", str(directory / "out"), *flags)
    args = make_command(directory).resolve(*flags)
    args.global_batch_size, args.world_size = 2, 1
    made = RolloutManager(RunConfig.of(args), slots=None, data_buffer=None)  # type: ignore[arg-type]
    made.start()
    return made


@pytest.mark.parametrize(("function", "keeps"), [(FULLY_ASYNC, True), ("", False)])
def test_a_rollout_function_that_keeps_groups_under_way_is_known_as_such(
    function: str, keeps: bool, tmp_path: Path
) -> None:
    made = make_manager(tmp_path, *(["--rollout-function-path", function] if function else []))
    assert made._keeps_prompts is keeps
    made.dispose()


def test_samples_that_fill_no_step_are_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "boxed", lambda batch, transport: batch)
    made = make_manager(tmp_path)
    result = made.generate(0)
    assert result.metrics["rollout/dropped_samples"] == 1
    assert [len(shard["tokens"]) for shard in result.shards] == [2]  # type: ignore[arg-type,index]
    assert "rollout/unique_token_share" not in result.metrics
    made.dispose()


def test_a_rollout_has_its_mean_reward_before_it_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "boxed", lambda batch, transport: batch)
    made = make_manager(tmp_path)
    assert made.generate(0).metrics["rollout/raw_reward"] == 1.0
    made.dispose()


def test_the_share_of_tokens_that_pass_the_trainer_is_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "boxed", lambda batch, transport: batch)
    made = make_manager(tmp_path, "--share-prefixes", "--micro-batch-size", "2")
    result = made.generate(0)
    assert result.metrics["rollout/unique_token_share"] == 0.5  # the samples are equal
    assert 0 < result.forward_flops < forward_flops([2, 2], made._args.hf_checkpoint, lambda _: None)
    made.dispose()


def test_the_death_of_an_engine_is_told_instead_of_what_it_does_to_a_rollout(tmp_path: Path) -> None:
    made = make_manager(tmp_path)

    def dead() -> None:
        raise EngineError("engine 0 died of it")

    def fails(*arguments: Any, **named: Any) -> None:
        raise ConnectionError("refused")

    made._servers = SimpleNamespace(raise_if_dead=dead, stop=lambda: None)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="engine 0 died of it"):
        made._call(fails, 0, evaluation=False)
    made.dispose()


def test_new_weights_do_not_overtake_an_evaluation_that_is_under_way() -> None:
    story: list[str] = []
    trainer = SimpleNamespace(update_weights=lambda *arguments: story.append("sync") or SyncReport(0.0, 0))
    run = make_run(args={"is_async": True}, trainer=trainer, engines=Engines())
    run.finish_evaluation = lambda: story.append("evaluated")  # type: ignore[method-assign,assignment,return-value]
    run.sync_weights(1)
    assert story == ["evaluated", "sync"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"proof": "full", "comes_again": False, "continues": True, "max_chunk_bytes": None}),
        ("--check-weight-update-equal", {"proof": "strict"}),
        ("--weight-sync-proof canary", {"proof": None}),
        ("--weight-sync-proof none --check-weight-update-equal", {"proof": "strict"}),
        ("--use-fault-tolerance", {"comes_again": True}),
        ("--colocate", {"continues": False}),
        ("--update-weight-buffer-size 4096 --weight-sync-timeout 7", {"max_chunk_bytes": 4096, "timeout_s": 7.0}),
        ("--keep-old-actor", {"kept": ["5"]}),
    ],
)
def test_an_update_is_made_as_the_flags_say(flags: str, expected: dict[str, Any], tmp_path: Path) -> None:
    args = make_command(tmp_path).resolve(*flags.split())
    kept: list[str] = []
    updates: list[Any] = []
    rank = object.__new__(TrainActor)
    rank._args, rank._sync_args, rank._kept_version = args, from_args(SyncArgs, args), None
    rank._trainer = SimpleNamespace(is_weight_source=True, keep_version=kept.append, adapter_proof=lambda version: None)
    rank._trainer.fixed_log_probs = lambda ids: [float(-token) for token in ids[1:]]
    rank._proof = root_proof(rank._sync_args, args.hf_checkpoint)
    rank._weight_updater = SimpleNamespace(  # type: ignore[assignment]
        update=lambda fleet, trainer, update: updates.append(update) or 0,
        changed_share=None,
    )
    fleet = SimpleNamespace(engines=[SimpleNamespace(num_gpus=1)])
    for _ in range(2):  # the same weights again do not make a new version to keep
        rank.update_weights(fleet, "5")  # type: ignore[arg-type]
    proof = updates[0].proof
    kind = None if proof is None else "strict" if proof.excuses == "none" else "full"
    found = vars(updates[0]) | {"proof": kind, "kept": kept}
    assert {name: found[name] for name in expected} == expected


def test_tensors_that_have_not_changed_are_left_out_where_the_flag_asks_for_it(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    changed_only = [
        weight_updater(RunConfig.of(command.resolve(*flags)), 0, 1)._sent_before is not None  # type: ignore[attr-defined]
        for flags in ((), ("--update-weight-changed-only",))
    ]
    assert changed_only == [False, True]


def test_the_users_function_is_called_with_the_files_of_a_version(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("def seen(args, version_dir, rollout_engines):\n    args.seen = (version_dir, rollout_engines)\n")
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "weights")]
    flags += ["--custom-update-weight-post-write-path", f"{hook}:seen"]
    args = make_command(tmp_path).resolve(*flags)
    updater = weight_updater(RunConfig.of(args, is_shared=True), 0, 1)
    updater._settings.post_write("version", SimpleNamespace(handles=("engine",)))  # type: ignore[attr-defined]
    assert args.seen == ("version", ["engine"])
