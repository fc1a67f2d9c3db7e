"""Rules 70-74 and 78: what the engine's flags must satisfy, on a whole command line."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.namespace import read_engine
from slime.backends.sglang_utils.rules import RULES, STEPS, engine_width


def resolved(line: str = "", **changes: Any) -> Namespace:
    names = read_engine(line.split(), ())
    assert names.problems == []
    values: dict[str, Any] = dict.fromkeys(("sglang_router_ip", "sglang_router_port", "sglang_config"))
    values |= {"prefill_num_servers": None, "rollout_external_engine_addrs": None, "debug_train_only": False}
    values |= {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 1, "hf_checkpoint": "/m", "notices": []}
    args = Namespace(**values | names.attributes | changes, given=names.given | changes.keys())
    engine_width(args)
    for step in STEPS:
        step(args)
    return args


def problems(line: str = "", **changes: Any) -> list[str]:
    args = resolved(line, **changes)
    return [problem for rule in RULES for problem in rule(args)]


def test_the_tensor_parallel_size_is_what_the_pipeline_leaves_of_an_engine():
    args = resolved("--sglang-pp-size 2", rollout_num_gpus_per_engine=8)
    assert (args.sglang_tp_size, args.sglang_tensor_parallel_size) == (4, 4)


def test_a_size_is_readable_under_both_names():
    args = resolved("--sglang-expert-parallel-size 4 --sglang-dp-size 2")
    assert (args.sglang_ep_size, args.sglang_expert_parallel_size) == (4, 4)
    assert (args.sglang_dp_size, args.sglang_data_parallel_size) == (2, 2)


def test_the_tensor_parallel_size_alone_decides_the_width_of_an_engine():
    args = resolved("--sglang-tp-size 2")
    assert args.rollout_num_gpus_per_engine == 2
    assert "rollout_num_gpus_per_engine" in args.given
    assert args.notices[0].level == "info"
    assert problems("--sglang-tp-size 2") == []


def test_both_sizes_given_must_agree():
    assert problems("--sglang-tp-size 2", rollout_num_gpus_per_engine=2) == []
    (problem,) = problems("--sglang-tp-size 2", rollout_num_gpus_per_engine=4)
    assert problem.startswith(
        "--sglang-tp-size 2 times --sglang-pp-size 1 is 2, but --rollout-num-gpus-per-engine is 4"
    )


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        ("--sglang-pp-size 3", {"rollout_num_gpus_per_engine": 8}, "8 must be a multiple of --sglang-pp-size 3"),
        ("--sglang-pp-size 2", {"rollout_num_gpus_per_engine": 8}, "--sglang-pp-size 2 is not supported yet"),
        ("--sglang-dp-size 2", {}, "--sglang-dp-size 2 needs --sglang-enable-dp-attention"),
        (
            "--sglang-dp-size 2 --sglang-enable-dp-attention",
            {"rollout_num_gpus_per_engine": 1},
            "--sglang-dp-size 2 must divide the tensor-parallel size 1",
        ),
        ("--sglang-dp-size 0", {}, "must all be at least 1"),
        ("", {"sglang_router_ip": "10.0.0.1"}, "--sglang-router-ip 10.0.0.1 needs --sglang-router-port"),
        ("", {"sglang_router_port": 99999}, "--sglang-router-port 99999 must be between"),
        ("", {"prefill_num_servers": 8}, "--prefill-num-servers 8 takes 8 of --rollout-num-gpus 8"),
        ("", {"prefill_num_servers": 0}, "--prefill-num-servers 0 must be at least 1"),
        (
            "",
            {"prefill_num_servers": 1, "rollout_external_engine_addrs": ["h:1"]},
            "--rollout-external-engine-addrs and --prefill-num-servers exclude each other",
        ),
        ("", {"sglang_config": "/nowhere.yaml"}, "--sglang-config /nowhere.yaml: there is no such file"),
    ],
)
def test_a_combination_that_cannot_work_is_explained(line: str, changes: dict[str, Any], message: str):
    found = problems(line, **changes)
    assert any(message in problem for problem in found), found


def test_attention_copies_within_an_engine_are_fine():
    line = "--sglang-dp-size 2 --sglang-enable-dp-attention"
    assert problems(line, rollout_num_gpus_per_engine=2) == []


def test_an_ipv6_router_address_gets_its_brackets():
    args = resolved("", sglang_router_ip="::1", sglang_router_port=1)
    assert args.sglang_router_ip == "[::1]"
    assert resolved("", sglang_router_ip="[::1]", sglang_router_port=1).sglang_router_ip == "[::1]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8}]}]", None),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 4}]}]",
            "its groups have 4 devices, --rollout-num-gpus is 8",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 4}, "
            "{worker_type: placeholder, num_gpus: 4}]}]",
            "worker_type placeholder is not supported yet",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8}]}, "
            "{name: b, update_weights: false}]",
            "2 models are not supported yet",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8, num_gpus_per_engine: 2}]}]",
            "num_gpus_per_engine 2 must be --rollout-num-gpus-per-engine 1 so far",
        ),
    ],
)
def test_a_deployment_file_is_checked_before_anything_starts(tmp_path: Path, text: str, message: str | None):
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    found = problems("", sglang_config=str(path))
    assert any(message in problem for problem in found) if message else found == [], found
