"""The handoff of shared devices: the loop's order of verbs, recorded by fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import train as driver
from slime.backends import TRAINER_PARTS, TrainReport
from slime.ray.engines import recovery
from slime.ray.run import loop, start
from slime.ray.run.device_handoff import DeviceHandoff
from slime.ray.shards import RolloutResult
from slime.ray.train_actor import SyncReport
from slime.ray.watch.progress import Progress
from slime.utils.errors import EngineError
from tests.unit.ray.runs import Engines, make_run

ALL = "+".join(TRAINER_PARTS)


class Recorder:
    """Every verb that is called on it goes into the story as ``who.verb(what)``."""

    def __init__(self, name: str, story: list[str], fails_at: str = "") -> None:
        self.name, self.story, self.fails_at = name, story, fails_at

    def tell(self, verb: str, what: str = "") -> None:
        self.story.append(f"{self.name}.{verb}" + (f"({what})" if what else ""))
        if verb == self.fails_at:
            raise EngineError(f"{self.name} failed at {verb}")


class FakeTrainer(Recorder):
    has_reward_kl = False

    def offload(self, parts=TRAINER_PARTS):
        self.tell("offload", "+".join(parts))

    def onload(self, parts=TRAINER_PARTS):
        self.tell("onload", "+".join(parts))

    def create(self):
        self.tell("create")

    def release(self):
        self.tell("release")

    def train(self, rollout_id, shards, versions, values=None):
        self.tell("train")
        return TrainReport()

    def reward_kl(self, rollout_id, shards, versions):
        self.tell("reward_kl")
        return "kl"

    def train_values(self, rollout_id, shards, versions, kl):
        self.tell("train", kl or "")
        return TrainReport(), []

    def update_weights(self, fleet, version):
        self.tell("update_weights")
        return SyncReport()

    def save(self, rollout_id):
        self.tell("save")

    def save_hf(self, path):
        self.tell("save_hf", path)

    def kill(self):
        self.tell("kill")


class FakeEngines(Recorder):
    def offload(self):
        self.tell("offload")

    def onload_weights(self):
        self.tell("onload_weights")

    def onload_kv(self):
        self.tell("onload_kv")


class FakeManager(Recorder):
    """``manager.verb.remote(...)`` records the verb and returns its result."""

    def __getattr__(self, verb: str) -> Any:
        results = {"generate": RolloutResult([], {}), "eval": {}}

        def remote(*arguments: Any) -> Any:
            self.tell(verb)
            return results.get(verb)

        return SimpleNamespace(remote=remote)


def story_of(
    monkeypatch,
    tmp_path,
    fails_at: str = "",
    *,
    num_rollout: int = 1,
    per_epoch: int | None = None,
    critic: bool = False,
    **more: Any,
) -> list[str]:
    """The verbs of ``train.py`` in a colocated run of these settings, from the first sync to the end."""
    story: list[str] = []
    settings: dict[str, Any] = {
        "eval_interval": None,
        "skip_eval_before_train": True,
        "update_weights_interval": 1,
        "save": "checkpoints",
        "offload_train": True,
        "offload_rollout": True,
        "release_train": False,
        **more,
    }
    args = SimpleNamespace(**settings)
    who, _, verb = fails_at.partition(".")
    make = lambda kind, name: kind(name, story, verb if name == who else "")  # noqa: E731
    trainer, of_critic = make(FakeTrainer, "trainer"), make(FakeTrainer, "critic") if critic else None
    run = make_run(
        args=settings,
        rollout_ids=range(num_rollout),
        rollouts_per_epoch=per_epoch,
        trainer=trainer,
        critic=of_critic,
        engines=Engines(),
        manager=make(FakeManager, "manager"),
        progress=Progress(tmp_path),
        handoff=DeviceHandoff(
            trainer,
            of_critic,
            make(FakeEngines, "engines") if args.offload_rollout else None,
            args.offload_train,
            args.release_train,
        ),
    )
    for module in (loop, recovery):
        monkeypatch.setattr(module, "get", lambda ref, *arguments, **more: ref)
    monkeypatch.setattr(loop.Run, "report", lambda run, *told: None)
    monkeypatch.setattr(loop.ray, "kill", lambda actor: None)
    monkeypatch.setattr(start, "start_run", lambda args: run)
    try:
        driver.train(args)
    except EngineError as error:
        story.append(f"! {error}")
    return story


SYNC = [
    *("trainer.onload(weights)", "trainer.offload(gradients+optimizer)", "engines.onload_weights"),
    *("trainer.update_weights", f"trainer.offload({ALL})", "engines.onload_kv"),
]
END = ["manager.dispose", "trainer.kill"]


def test_memory_changes_hands_in_the_order_that_never_has_two_owners(monkeypatch, tmp_path):
    assert story_of(monkeypatch, tmp_path, save_interval=1) == [
        *SYNC,
        *(f"trainer.offload({ALL})", "engines.onload_kv", "manager.generate"),
        *("engines.offload", f"trainer.onload({ALL})", "trainer.train"),
        *("engines.offload", f"trainer.onload({ALL})", "trainer.save"),
        *SYNC,
        *END,
    ]


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({"save": None, "save_hf": "hf_{rollout_id}"}, ["save_hf(hf_2)"]),
        ({"save": None, "save_hf": "hf", "save_interval": 2}, ["save_hf(hf)", "save_hf(hf)"]),
        ({"save_hf": "hf", "save_interval": 3}, ["save", "save_hf(hf)"]),
        ({"save": None}, []),
    ],
)
def test_an_export_without_an_interval_is_written_after_the_last_rollout(monkeypatch, tmp_path, settings, saved):
    story = story_of(monkeypatch, tmp_path, num_rollout=3, **settings)
    assert [verb for verb in story if "save" in verb] == [f"trainer.{verb}" for verb in saved]


@pytest.mark.parametrize(("per_epoch", "after"), [(2, [1, 2, 3, 4]), (None, [2, 4])])
def test_saves_and_evaluations_follow_the_interval_the_epochs_and_the_end(monkeypatch, tmp_path, per_epoch, after):
    intervals = {"save_interval": 3, "eval_interval": 3}
    story = story_of(monkeypatch, tmp_path, num_rollout=5, per_epoch=per_epoch, **intervals)
    for verb in ("trainer.save", "manager.eval"):
        done = [story[:place].count("trainer.train") - 1 for place, told in enumerate(story) if told == verb]
        assert done == after


def test_an_evaluation_after_training_without_a_sync_has_the_engines_awake(monkeypatch, tmp_path):
    story = story_of(monkeypatch, tmp_path, num_rollout=2, update_weights_interval=2, eval_interval=1)
    first = story.index("trainer.train")
    assert story[first + 1 : first + 4] == [f"trainer.offload({ALL})", "engines.onload_kv", "manager.eval"]


def test_actor_and_critic_take_turns(monkeypatch, tmp_path):
    story = story_of(monkeypatch, tmp_path, critic=True, offload_rollout=False, save_interval=1)
    begin = story.index("manager.generate")
    assert story[begin + 1 : story.index("trainer.save") + 1] == [
        *(f"trainer.offload({ALL})", f"critic.onload({ALL})", "critic.train"),
        *(f"critic.offload({ALL})", f"trainer.onload({ALL})", "trainer.train"),
        *(f"trainer.offload({ALL})", f"critic.onload({ALL})", "critic.save"),
        *(f"critic.offload({ALL})", f"trainer.onload({ALL})", "trainer.save"),
    ]


def test_the_policy_has_the_devices_before_a_critic_whose_returns_have_its_kl(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeTrainer, "has_reward_kl", True)
    story = story_of(monkeypatch, tmp_path, critic=True, save=None)
    begin = story.index("manager.generate")
    assert story[begin + 1 : story.index("trainer.train") + 1] == [
        *("engines.offload", f"critic.offload({ALL})", f"trainer.onload({ALL})", "trainer.reward_kl"),
        *("engines.offload", f"trainer.offload({ALL})", f"critic.onload({ALL})", "critic.train(kl)"),
        *("engines.offload", f"critic.offload({ALL})", f"trainer.onload({ALL})", "trainer.train"),
    ]


def test_with_release_train_the_processes_end_and_start_around_every_step(monkeypatch, tmp_path):
    story = story_of(monkeypatch, tmp_path, offload_train=False, release_train=True, save_interval=1)
    sync = ["trainer.create", "trainer.offload(gradients+optimizer)", "engines.onload_weights"]
    sync += ["trainer.update_weights", "trainer.release"]
    assert story == [
        *(*sync, "engines.onload_kv", "trainer.release", "engines.onload_kv", "manager.generate"),
        *("engines.offload", "trainer.create", "trainer.train", "engines.offload", "trainer.create", "trainer.save"),
        *(*sync, "engines.onload_kv", *END),
    ]


def test_nothing_moves_when_everybody_has_devices_of_his_own(monkeypatch, tmp_path):
    story = story_of(monkeypatch, tmp_path, offload_train=False, offload_rollout=False)
    assert story == [
        *("trainer.update_weights", "manager.generate", "trainer.train"),
        *("trainer.update_weights", *END),
    ]


@pytest.mark.parametrize(
    "verb", ["trainer.train", "trainer.onload", "trainer.update_weights", "engines.onload_kv", "engines.offload"]
)
def test_engines_that_an_error_leaves_asleep_are_stopped(verb, monkeypatch, tmp_path):
    story = story_of(monkeypatch, tmp_path, verb)
    assert story[-3:] == [*END, f"! {verb.partition('.')[0]} failed at {verb.partition('.')[2]}"]


def test_the_seconds_of_every_move_are_measured():
    handoff = DeviceHandoff(FakeTrainer("t", []), None, FakeEngines("e", []), moves_trainer=True)
    handoff.to_trainer()
    handoff.to_sync()
    handoff.to_engines()
    assert set(handoff.seconds) == {"sleep", "wake_up", "engine_offload", "engine_onload"}
    assert min(handoff.seconds.values()) >= 0


def test_who_does_not_move_takes_no_time():
    handoff = DeviceHandoff(FakeTrainer("t", []), FakeTrainer("c", []))
    handoff.to_critic()
    handoff.to_trainer()
    handoff.to_sync()
    handoff.to_engines()
    assert handoff.seconds == {}


class Newcomers(Recorder):
    def start(self, verb, **kwargs):
        self.tell(verb, ",".join(kwargs.get("tags", ())))
        return SimpleNamespace(wait=lambda timeout_s: None)


@pytest.mark.parametrize("fails", [False, True])
def test_engines_that_all_died_get_weights_in_the_middle_of_a_rollout_and_nobody_keeps_memory_he_does_not_need(fails):
    story: list[str] = []
    handoff = DeviceHandoff(FakeTrainer("trainer", story), None, FakeEngines("engines", story), moves_trainer=True)
    try:
        with handoff.to_sync_with(Newcomers("new", story), 1.0):
            story.append("update")
            assert not fails
    except AssertionError:
        assert fails
    assert story == [
        *("new.release_memory_occupation(kv_cache)", "trainer.onload(weights)", "update"),
        *(f"trainer.offload({ALL})", "new.resume_memory_occupation(kv_cache)", "new.continue_generation"),
    ]
