"""Engines of a --sglang-config file in the plan: numbered through the run, devices that are left alone."""

from __future__ import annotations

from pathlib import Path

from tests.unit.config.test_plan_build import placement


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
