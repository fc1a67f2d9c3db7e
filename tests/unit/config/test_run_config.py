"""One frozen object for the resolved command line: sections, facts, and the namespace for hooks."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from argparse import Namespace

import pytest

from slime.config.groups import RunConfig
from slime.data.arguments import BatchSizeArgs, RunLengthArgs
from slime.ray.arguments import GROUPS
from tests.unit.config.tiny_command import TinyCommand

ROUTERS = {"default": ("10.0.0.1", 30000), "judge": ("10.0.0.2", 30001)}


def test_every_argument_group_is_a_section(command: TinyCommand) -> None:
    args = command.resolve()
    config = RunConfig.of(args)
    for group in GROUPS:
        section = config[group]
        assert section is config[group]
        assert all(getattr(section, item.name) == getattr(args, item.name) for item in dataclasses.fields(group))


def test_a_section_is_frozen_and_takes_defaults_for_what_is_missing() -> None:
    config = RunConfig.of(Namespace(rollout_batch_size=4))
    assert config[BatchSizeArgs].rollout_batch_size == 4
    assert config[RunLengthArgs].num_epoch is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config[BatchSizeArgs].rollout_batch_size = 5  # type: ignore[misc]


def test_the_configuration_does_not_follow_later_writes_to_args() -> None:
    args = Namespace(rollout_batch_size=4)
    config = RunConfig.of(args)
    args.rollout_batch_size = 8
    assert config[BatchSizeArgs].rollout_batch_size == 4


def test_facts_reach_sections_and_hooks() -> None:
    before = RunConfig.of(Namespace(num_rollout=None, sglang_router_ip=None))
    after = before.with_facts(num_rollout=7).with_facts(routers=ROUTERS, start_rollout_id=3)
    assert after[RunLengthArgs].num_rollout == after.args.num_rollout == 7
    assert after.args.sglang_model_routers == ROUTERS
    assert (after.args.sglang_router_ip, after.args.sglang_router_port) == ROUTERS["default"]
    assert after.facts.start_rollout_id == 3
    assert before.facts.num_rollout is before[RunLengthArgs].num_rollout is None


def test_facts_are_added_to_the_namespace_that_hooks_hold_already() -> None:
    config = RunConfig.of(Namespace(num_rollout=None))
    held = config.args
    assert config.with_facts(num_rollout=7).args is held
    assert held.num_rollout == 7


def test_hooks_of_a_shared_namespace_get_it_itself_but_those_of_a_role_do_not() -> None:
    config = RunConfig.of(held := Namespace(num_rollout=None), is_shared=True)
    assert config.with_facts(num_rollout=7).args is config.args is held
    assert held.num_rollout == 7
    assert config.with_values(num_rollout=2).args is not held


def test_a_role_or_a_restart_changes_values() -> None:
    config = RunConfig.of(Namespace(rollout_batch_size=4)).with_values(rollout_batch_size=2)
    assert config[BatchSizeArgs].rollout_batch_size == config.args.rollout_batch_size == 2


def test_hooks_of_a_process_share_one_namespace_and_its_state_does_not_travel() -> None:
    config = RunConfig.of(Namespace(rollout_batch_size=4)).with_facts(num_rollout=7)
    config.args.lock = threading.Lock()
    assert config.args.lock is config.args.lock
    twin = pickle.loads(pickle.dumps(config))
    assert vars(twin.args) == {"rollout_batch_size": 4, "num_rollout": 7}
    assert twin.facts == config.facts
