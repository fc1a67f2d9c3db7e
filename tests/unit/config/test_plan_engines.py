"""Engines of a --sglang-config file in the plan: numbered through the run, devices that are left alone."""

from __future__ import annotations

from pathlib import Path

from tests.unit.config.test_plan_build import placement
from tests.unit.config.tiny_command import TinyCommand


def test_engines_have_their_numbers_in_the_run_and_placeholders_have_none(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(
        "sglang: [{name: actor, server_groups: [{worker_type: regular, num_gpus: 2}, {worker_type: placeholder, "
        "num_gpus: 2}, {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}]}, "
        "{name: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}]"
    )
    plan = placement(rollout_num_gpus=9, sglang_config=str(file), debug_rollout_only=True)
    assert plan.nodes[0].engines == ["engines 0-1", "2 left alone", "engines 2-3"]
    assert plan.nodes[1].engines == ["engine 4"]
    assert plan.routers == ["actor", "ref"]


def test_the_groups_of_a_file_need_not_be_multiples_of_the_width_that_they_do_not_have(command: TinyCommand) -> None:
    """Groups of widths 2 and 1 on three devices. A group without a width has two devices per engine."""
    groups = "{worker_type: regular, num_gpus: 2}, {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}"
    file = command.write("engines.yaml", f"sglang: [{{name: a, server_groups: [{groups}]}}]")
    flags = ("--rollout-num-gpus", 3, "--rollout-num-gpus-per-engine", 2)
    args = command.resolve(*flags, "--sglang-config", file, without=("--rollout-num-gpus",))
    assert args.rollout_num_engines == 2
    assert "two nodes" not in command.warnings(*flags, "--sglang-config", file, "--num-gpus-per-node", 5)
    _, problems = command.run(*flags)
    assert "--rollout-num-gpus 3 must be a multiple of --rollout-num-gpus-per-engine 2" in problems
