"""The slots of trainer and engines."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.topology import topology_of
from slime.config.arguments import ClusterArgs
from slime.config.groups import from_args
from slime.config.plan.placement import plan_placement, read_layout
from slime.ray import placement_group
from slime.ray.placement_group import GpuSlots, create_placement_groups
from slime.ray.run.cluster import slot_layout
from slime.ray.run.device_handoff import engines_share_devices
from slime.utils.errors import ConfigError
from tests.unit.config.plan_args import plan_args


def settings(**flags) -> SimpleNamespace:
    base = {"world_size": 4, "rollout_num_gpus": 2, "colocate": False, "rollout_external": False}
    modes = {"debug_rollout_only": False, "debug_train_only": False, "placement_timeout": 1.0}
    return SimpleNamespace(**base | modes | {"offload_rollout": True} | flags)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({}, (6, 4)),
        ({"rollout_num_gpus": 0}, (4, 4)),
        ({"colocate": True}, (4, 0)),
        ({"colocate": True, "rollout_num_gpus": 7}, (7, 0)),
        ({"colocate": True, "rollout_num_gpus": 0}, (4, 0)),
        ({"debug_train_only": True}, (4, 4)),
        ({"debug_rollout_only": True}, (2, 0)),
        ({"rollout_external": True}, (4, 4)),
    ],
)
def test_the_slots_of_a_run_are_counted_as_its_mode_needs_them(flags, layout):
    assert slot_layout(settings(**flags))[:2] == layout


@pytest.mark.parametrize(
    ("flags", "trainer", "engines"),
    [
        ({}, [5, 4, 3, 2], [1, 0]),
        ({"colocate": True}, [3, 2, 1, 0], [3, 2]),
        ({"colocate": True, "rollout_num_gpus": 6}, [5, 4, 3, 2], [5, 4, 3, 2, 1, 0]),
        ({"debug_train_only": True}, [3, 2, 1, 0], []),
        ({"debug_rollout_only": True}, [], [1, 0]),
        ({"rollout_external": True}, [3, 2, 1, 0], []),
    ],
)
def test_trainer_and_engines_take_their_slots_in_device_order(flags, trainer, engines, monkeypatch):
    """Bundles come in the reverse of the order of their devices here: what counts is the sorted order."""
    monkeypatch.setattr(
        placement_group, "_reserve", lambda count, *_, **__: GpuSlots(None, range(count)[::-1], range(count))
    )
    slots = create_placement_groups(settings(**flags))
    assert list(slots["actor"].bundles) == trainer
    assert list(slots["rollout"].bundles) == engines


def test_engines_take_turns_only_where_they_share_devices_and_release_memory():
    def share(**flags):
        return engines_share_devices(from_args(ClusterArgs, settings(**flags)))

    assert share(colocate=True)
    assert not share()
    assert not share(colocate=True, offload_rollout=False)
    assert not share(colocate=True, debug_train_only=True)


UNEQUAL = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 4}
      - {worker_type: placeholder, num_gpus: 3}
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4}
  - name: ref
    update_weights: false
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}
      - {worker_type: placeholder, num_gpus: 3}
"""


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2},
        {"rollout_num_gpus": 6, "colocate": True},
        {"rollout_num_gpus": 6, "prefill_num_servers": 2},
        {"rollout_num_gpus": 15, "sglang_config": UNEQUAL},
        {"rollout_num_gpus": 15, "sglang_config": UNEQUAL, "colocate": True},
        {"debug_rollout_only": True},
        {"debug_train_only": True, "rollout_num_gpus": 0},
    ],
)
def test_the_plan_shows_the_slots_that_the_run_takes(flags, tmp_path):
    values = vars(plan_args(**vars(settings()))) | {"sglang_config": None, "prefill_num_servers": None} | flags
    if values["sglang_config"] is not None:
        path = tmp_path / "engines.yaml"
        path.write_text(values["sglang_config"])
        values["sglang_config"] = str(path)
    args = Namespace(**values)
    plan = plan_placement(args, read_layout(args))
    count, first = slot_layout(args)[:2]
    places = [] if args.debug_train_only else topology_of(args).places(args.hf_checkpoint).values()
    taken = {place.rank: (first + place.first_slot, place.num_gpus) for model in places for place in model}
    shown = {
        group.first_number + number: (group.first_slot + number * group.devices_per_engine, group.devices_per_engine)
        for group in plan.engines
        if group.kind != "placeholder"
        for number in range(group.num_engines)
    }
    assert shown == taken
    assert plan.num_slots == count


def test_devices_that_are_named_by_uuid_are_refused_with_what_names_them(monkeypatch):
    assert [placement_group._number_of(ids) for ids in ([], [3], ["3"])] == [0, 3, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a,GPU-9b")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=GPU-8a,GPU-9b names the device GPU-9b"):
        placement_group._number_of(["GPU-9b"])
