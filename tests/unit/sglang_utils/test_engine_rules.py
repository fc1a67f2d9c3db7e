"""Rules 70-74 and 78: requirements on the engine's flags, on a whole command line."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.namespace import read_engine
from slime.backends.sglang_utils.rules import MACHINE_RULES, RULES, STEPS, engine_width
from slime.backends.sglang_utils.topology import topology_of
from slime.utils import accelerator
from slime.utils.accelerator import CUDAAccelerator

SPLIT = "{name: a, server_groups: [{worker_type: prefill, num_gpus: 4}, {worker_type: decode, num_gpus: 4}]}"
"""A model of a deployment file: prefill and decode on different engines."""
KINDS = ("prefill", "decode")


def resolved(line: str = "", **changes: Any) -> Namespace:
    names = read_engine(line.split(), ())
    assert names.problems == []
    values: dict[str, Any] = dict.fromkeys(("sglang_router_ip", "sglang_router_port", "sglang_config"))
    values |= {"prefill_num_servers": None, "rollout_external_engine_addrs": None, "debug_train_only": False}
    values |= {"engine_start_timeout": None}
    values |= {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 1, "hf_checkpoint": "/m", "notices": []}
    values |= {
        "num_gpus_per_node": 8,
        "debug_rollout_only": False,
        "world_size": 0,
        "colocate": False,
        "offload_rollout": False,
        "use_rollout_routing_replay": False,
        "fp32": False,
        "fp16": False,
        "update_weight_transport": "nccl",
    }
    args = Namespace(**values | names.attributes | changes, given=names.given | changes.keys())
    engine_width(args)
    for step in STEPS:
        step(args)
    return args


def problems(line: str = "", **changes: Any) -> list[str]:
    args = resolved(line, **changes)
    return [problem for rule in RULES for problem in rule(args)]


@pytest.mark.parametrize("flag", ["--sglang-language-only", "--sglang-encoder-only"])
def test_a_trained_model_keeps_its_vision_tower_in_its_engines(flag: str):
    (problem,) = problems(flag)
    assert problem.startswith(f"{flag}: SGLang's encoder server has no request that updates its weights")
    assert problems(flag, debug_rollout_only=True) == []


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
        (
            "--sglang-pp-size 2",
            {"rollout_num_gpus_per_engine": 8},
            "--sglang-pp-size 2: an engine with pipeline stages cannot receive trained weights: SGLang confirms",
        ),
        (
            "--sglang-pp-size 2",
            {"rollout_num_gpus_per_engine": 8, "debug_rollout_only": True, "offload_rollout": True},
            "--sglang-pp-size 2 does not work with --offload-rollout (--colocate): only the first stage",
        ),
        (
            "--sglang-pp-size 2",
            {"rollout_num_gpus_per_engine": 8, "debug_rollout_only": True, "use_rollout_routing_replay": True},
            "--sglang-pp-size 2 does not work with --use-rollout-routing-replay",
        ),
        ("--sglang-dp-size 2", {}, "--sglang-dp-size 2 needs --sglang-enable-dp-attention"),
        (
            "--sglang-dp-size 2 --sglang-enable-dp-attention",
            {"rollout_num_gpus_per_engine": 1},
            "--sglang-dp-size 2 must divide the tensor-parallel size 1",
        ),
        ("--sglang-dp-size 0", {}, "must all be at least 1"),
        (
            "--sglang-pp-size 2",
            {"rollout_num_gpus_per_engine": 1},
            "per-engine 1 must be a multiple of --sglang-pp-size",
        ),
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


@pytest.mark.parametrize(
    ("file", "text", "is_there"),
    [
        ("managers/scheduler.py", "is_rank_zero = (\n            get_parallel().pp_rank == 0", True),
        ("model_executor/model_runner_components/weight_updater.py", "rank = rank_offset + self.tp_rank\n", True),
        ("managers/scheduler_pp_mixin.py", "routed_experts", False),
        ("disaggregation/encoder/http_server.py", "update_weights", False),
    ],
)
def test_what_the_refusals_say_of_sglang_holds_for_the_installed_one(file: str, text: str, is_there: bool):
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    assert (text in (Path(package) / "srt" / file).read_text()) == is_there


def test_engines_that_are_sent_no_weights_may_have_pipeline_stages(tmp_path: Path):
    assert problems("--sglang-pp-size 2", rollout_num_gpus_per_engine=8, debug_rollout_only=True) == []
    path = tmp_path / "engines.yaml"
    group = "{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4, overrides: {pipeline_parallel_size: PP}}"
    text = "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 4}]}, "
    text += f"{{name: b, update_weights: BOOL, server_groups: [{group}]}}]"
    for stages, is_updated, message in (
        (2, "false", None),
        (3, "false", "model b: num_gpus_per_engine 4 must be a multiple of the pipeline stages, pp_size 3"),
        (0, "false", "model b: num_gpus_per_engine 4 must be a multiple of the pipeline stages, pp_size 0"),
        (2, "true", "model b: pp_size 2: an engine with pipeline stages cannot receive trained weights"),
    ):
        path.write_text(text.replace("PP", str(stages)).replace("BOOL", is_updated))
        found = problems("", sglang_config=str(path))
        assert len(found) == (message is not None), found
        assert message is None or message in found[0]
    path.write_text(text.replace("PP", "2").replace("BOOL", "false"))
    places = topology_of(resolved("", sglang_config=str(path))).places("/m")
    assert [place.num_tensor_ranks(1) for place in places["a"] + places["b"]] == [1, 1, 1, 1, 2]


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
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 2}, "
            "{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}, {worker_type: placeholder, num_gpus: 2}]}, "
            "{name: b, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 2}]}]",
            None,
        ),
        (
            "sglang: [{name: a, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 8}]}]",
            "no model has update_weights: true",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: encoder, num_gpus: 8}]}]",
            "model a: worker_type encoder is not supported: SGLang's encoder server cannot receive weights",
        ),
        (
            "sglang: [{name: a, server_groups: "
            "[{worker_type: regular, num_gpus: 8, overrides: {language_only: true}}]}]",
            "model a: overrides: language_only: SGLang's encoder server cannot receive weights",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 4}]}, "
            "{name: b, update_weights: false, server_groups: [{worker_type: encoder, num_gpus: 4}]}]",
            "Start it before the run, and give the regular group overrides: {language_only: true, encoder_urls:",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 8}]}]",
            "model a: prefill engines need decode engines",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 2}, "
            "{worker_type: decode, num_gpus: 4}, {worker_type: regular, num_gpus: 2}]}]",
            "model a: regular engines cannot share the router of prefill and decode engines",
        ),
        (f"sglang: [{SPLIT}]", None),
    ],
)
def test_a_deployment_file_is_checked_before_anything_starts(tmp_path: Path, text: str, message: str | None):
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    found = problems("", sglang_config=str(path))
    assert any(message in problem for problem in found) if message else found == [], found


def test_prefill_and_decode_apart_can_be_planned_anywhere_but_not_started_without_gpus(tmp_path: Path):
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang: [{SPLIT}]")
    for changes, flag in (
        ({"prefill_num_servers": 2}, "--prefill-num-servers 2"),
        ({"sglang_config": str(path)}, f"--sglang-config {path}: model a"),
    ):
        args = resolved("", **changes)
        assert problems("", **changes) == []
        (problem,) = (problem for rule in MACHINE_RULES for problem in rule(args))
        assert problem.startswith(f"{flag}: prefill and decode on different engines need GPUs")
        args.debug_train_only = True
        assert [problem for rule in MACHINE_RULES for problem in rule(args)] == []
    assert [problem for rule in MACHINE_RULES for problem in rule(resolved(""))] == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"sglang_speculative_algorithm": "EAGLE"}, "Use NGRAM"),
        ({"sglang_speculative_algorithm": "EAGLE", "rollout_external_engine_addrs": ["a:1"]}, None),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay"),
        ({"rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus-per-engine 2"),
    ],
)
def test_only_drafts_from_history_run_without_a_gpu(changes: dict[str, Any], part: str | None):
    args = resolved("", **({"sglang_speculative_algorithm": "NGRAM"} | changes))
    found = [problem for rule in MACHINE_RULES for problem in rule(args)]
    assert len(found) == (part is not None)
    assert all(one.startswith("--sglang-speculative-algorithm") and part in one for one in found)


def test_an_engine_that_shares_the_sending_gpu_must_share_all_of_them(monkeypatch: pytest.MonkeyPatch):
    shared = {"colocate": True, "world_size": 4, "update_weight_transport": "nccl"}
    wide = resolved("", rollout_num_gpus_per_engine=8, **shared)
    fitting = resolved("", rollout_num_gpus_per_engine=4, **shared)

    def found(args: Namespace) -> list[str]:
        return [problem for rule in MACHINE_RULES for problem in rule(args)]

    assert found(wide) == [], "gloo does not mind"
    monkeypatch.setattr(accelerator, "current", CUDAAccelerator)
    assert [problem.partition(":")[0] for problem in found(wide)] == ["--colocate"]
    assert found(fitting) == []
    wide.update_weight_transport = "disk"
    assert found(wide) == []


def test_expert_choices_cannot_be_asked_of_prefill_and_decode_engines(tmp_path: Path):
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang: [{SPLIT}]")
    engine = {"url": "http://h:1", "host": "h", "port": 1, "num_gpus": 1, "disaggregation_bootstrap_port": 2}
    infos = [engine | {"worker_type": kind, "server_info": {"enable_return_routed_experts": True}} for kind in KINDS]
    external = {"rollout_external_engine_addrs": ["h:1", "h:2"], "rollout_external_engine_infos": infos}
    for changes, flag in (
        ({"prefill_num_servers": 2}, "--prefill-num-servers 2"),
        ({"sglang_config": str(path)}, f"--sglang-config {path}: model a"),
        (external, "--rollout-external-engine-addrs"),
    ):
        (problem,) = (
            text for text in problems("", use_rollout_routing_replay=True, **changes) if "different engines" in text
        )
        assert problem.startswith("--use-rollout-routing-replay does not work")
        assert f"({flag})" in problem
    path.write_text("sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8}]}]")
    assert problems("", use_rollout_routing_replay=True, sglang_config=str(path)) == []


def test_a_cut_vocabulary_is_refused_with_prefill_and_decode_engines_before_anything_starts():
    """The router would drop the question for the sampling sets."""
    (only,) = problems("", prefill_num_servers=2, rollout_top_p=0.9, rollout_top_k=-1)
    assert only.startswith("--rollout-top-p 0.9 --rollout-top-k -1 does not work with prefill and decode")
    assert "--prefill-num-servers 2" in only
    assert problems("", rollout_top_p=0.9, rollout_top_k=-1) == []
    assert problems("", prefill_num_servers=2, rollout_top_p=1.0, rollout_top_k=-1) == []


@pytest.mark.parametrize(
    ("width", "num_ranks", "message"),
    [
        (16, 8, None),
        (16, 0, None),
        (12, 0, "num_gpus_per_engine 12 must be a multiple of --num-gpus-per-node 8"),
        (16, 4, "engine 0 of model a, with 16 devices, would begin in the middle of a node of --num-gpus-per-node 8"),
    ],
)
def test_an_engine_over_several_nodes_takes_whole_ones(tmp_path: Path, width: int, num_ranks: int, message: str | None):
    path = tmp_path / "engines.yaml"
    text = f"{{worker_type: regular, num_gpus: {width}, num_gpus_per_engine: {width}}}"
    path.write_text(f"sglang: [{{name: a, server_groups: [{text}]}}]")
    found = problems("", sglang_config=str(path), rollout_num_gpus=width, world_size=num_ranks)
    assert found == [] if message is None else any(message in text for text in found), found


@pytest.mark.parametrize(
    ("config", "line", "changes", "dtype"),
    [
        ({"dtype": "float32"}, "", {}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "", {"fp32": True}, "float32"),
        ({"text_config": {"dtype": "float32"}}, "", {"fp16": True}, "float16"),
        ({"dtype": "float32"}, "--sglang-dtype half", {}, "half"),
        ({"dtype": "float16", "quantization_config": {"quant_method": "gptq"}}, "", {}, "auto"),
        ({"dtype": "float16"}, "--sglang-quantization fp8", {}, "auto"),
    ],
)
def test_engines_hold_weights_in_the_precision_that_the_trainer_sends(
    tmp_path: Path, config: dict[str, Any], line: str, changes: dict[str, Any], dtype: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = resolved(line, hf_checkpoint=str(tmp_path), **changes)
    assert args.sglang_dtype == dtype
    is_noticed = dtype in ("bfloat16", "float16", "float32")
    assert any(notice.flag == "--sglang-dtype" for notice in args.notices) is is_noticed


def test_nothing_is_said_about_a_checkpoint_in_the_trainers_precision(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert resolved("", hf_checkpoint=str(tmp_path)).notices == []


def test_engines_that_the_run_does_not_start_are_left_as_they_are(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    for changes in ({"debug_train_only": True}, {"rollout_external_engine_addrs": ["a:1"]}):
        args = resolved("", hf_checkpoint=str(tmp_path), **changes)
        assert (args.sglang_dtype, args.notices) == ("auto", [])


def test_engines_that_answer_are_counted_where_the_devices_do_not_say_it(tmp_path: Path):
    path = tmp_path / "engines.yaml"
    groups = "{worker_type: regular, num_gpus: 4}, {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4}"
    path.write_text(f"sglang: [{{name: a, server_groups: [{groups}]}}]")
    assert resolved("", sglang_config=str(path)).rollout_num_engines == 5
    assert resolved("", prefill_num_servers=2).rollout_num_engines == 6
    planned = resolved("", rollout_external_engine_addrs=["a:1", "b:1"], rollout_num_gpus=None)
    assert (planned.rollout_num_engines, planned.rollout_num_gpus) == (2, 2)
    assert not hasattr(resolved(""), "rollout_num_engines")


def test_engines_of_others_do_not_take_turns_with_the_trainer():
    found = problems("", rollout_external_engine_addrs=["a:1"], colocate=True, offload_rollout=True)
    assert [text.split(" does")[0] for text in found] == ["--colocate", "--offload-rollout"]


@pytest.mark.parametrize(("num_ranks", "is_warned"), [(0, False), (2, True)])
def test_an_engine_on_two_nodes_is_warned_of(tmp_path: Path, num_ranks: int, is_warned: bool):
    path = tmp_path / "engines.yaml"
    group = "{worker_type: regular, num_gpus: 8, num_gpus_per_engine: 4}"
    path.write_text(f"sglang: [{{name: a, server_groups: [{group}]}}]")
    args = resolved("", sglang_config=str(path), world_size=num_ranks)
    assert [problem for rule in RULES for problem in rule(args)] == []
    assert any("engine 1 of model a would be on two nodes" in str(note) for note in args.notices) is is_warned
