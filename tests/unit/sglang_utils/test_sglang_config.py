"""A deployment file as plain values: as written, then with everything that follows from the command line."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.sglang_utils.arguments import validate_args
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig
from slime.utils.errors import ConfigError
from tests.unit.sglang_utils.test_engine_rules import SPLIT, resolved

ARGS = Namespace(hf_checkpoint="/m", rollout_num_gpus_per_engine=2, rollout_num_gpus=8, prefill_num_servers=1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    second = "{name: ref, model_path: /r, engine_groups: [{worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}]}"
    file.write_text(f"sglang: [{SPLIT}, {second}]")
    config = SglangConfig.from_yaml(str(file))
    assert [model.name for model in config.models] == ["a", "ref"]
    assert config.models[1].server_groups == [ServerGroupConfig("regular", 1, 1)]
    assert (config.has_pd_disaggregation, config.models[1].has_pd_disaggregation) == (True, False)
    assert config.total_num_gpus == 9
    file.write_text("sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 0}]}]")
    with pytest.raises(ConfigError, match="num_gpus: 0 must be a whole number of at least 1"):
        SglangConfig.from_yaml(str(file))


def test_what_the_file_leaves_open_follows_from_the_command_line() -> None:
    groups = [ServerGroupConfig("regular", 4), ServerGroupConfig("regular", 1, 1, {"context_length": 7})]
    trained = ModelConfig("a", server_groups=groups)
    trained.resolve(ARGS)
    assert [group.num_gpus_per_engine for group in groups] == [2, 1]
    assert (trained.model_path, trained.update_weights) == ("/m", True)
    frozen = ModelConfig("b", model_path="/r", server_groups=[ServerGroupConfig("regular", 1)])
    frozen.resolve(ARGS)
    assert (frozen.server_groups[0].overrides, frozen.update_weights) == ({"model_path": "/r"}, False)
    groups[0].overrides["model_path"] = "/other"
    with pytest.raises(ConfigError, match="model a: its groups serve different models: /m, /other"):
        trained.resolve(ARGS)


def test_prefill_servers_leave_the_rest_to_decode() -> None:
    config = SglangConfig.from_prefill_num_servers(ARGS)
    assert [(group.worker_type, group.num_gpus) for group in config.models[0].server_groups] == [
        ("prefill", 2),
        ("decode", 6),
    ]
    with pytest.raises(ConfigError, match="--prefill-num-servers 4 must leave some of --rollout-num-gpus 8"):
        SglangConfig.from_prefill_num_servers(Namespace(**vars(ARGS) | {"prefill_num_servers": 4}))


def test_a_parser_of_ones_own_gets_every_problem_in_one_error() -> None:
    validate_args(resolved())
    with pytest.raises(ConfigError, match="2 problems"):
        validate_args(resolved(sglang_router_port=99999, prefill_num_servers=0))


def test_a_plain_namespace_is_checked_with_the_defaults_of_what_it_lacks() -> None:
    args = Namespace(rollout_num_gpus_per_engine=4, sglang_pp_size=1, sglang_router_ip="::1", sglang_router_port=3000)
    validate_args(args)
    assert (args.sglang_tp_size, args.sglang_tensor_parallel_size, args.sglang_router_ip) == (4, 4, "[::1]")
    with pytest.raises(ConfigError, match="--sglang-dp-size 2 needs --sglang-enable-dp-attention"):
        validate_args(Namespace(rollout_num_gpus_per_engine=4, sglang_dp_size=2))
    with pytest.raises(ConfigError, match=r"--sglang-tp-size 2 times .* is 2, but .* is 4"):
        validate_args(Namespace(rollout_num_gpus_per_engine=4, sglang_tp_size=2))
