"""``--sglang-config`` and ``--prefill-num-servers``: which servers a run has."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.option_table import RENAMED, server_options
from slime.backends.sglang_utils.topology import (
    ServerGroupSpec,
    Topology,
    WorkerType,
    override_argv,
    read_topology,
    topology_of,
)
from slime.utils.errors import ConfigError

EXAMPLE = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 4}
      - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 4, overrides: {mem-fraction-static: 0.7}}
  - name: ref
    model_path: /ref
    update_weights: false
    engine_groups:
      - {worker_type: regular, num_gpus: 4}
"""


@pytest.fixture
def read(tmp_path: Path):
    path = tmp_path / "engines.yaml"

    def read_text(text: str) -> Topology:
        path.write_text(text)
        return read_topology(str(path), hf_checkpoint="/m", num_gpus_per_engine=1)

    return read_text


def group(**keys: Any) -> str:
    """A file of one model with one group. A key that is None is left out."""
    entry = {"worker_type": "regular", "num_gpus": 4} | keys
    entry = {key: value for key, value in entry.items() if value is not None}
    return json.dumps({"sglang": [{"name": "a", "server_groups": [entry]}]})  # JSON is YAML


def test_widths_paths_and_aliases_are_filled_in(read):
    topology = read(EXAMPLE)
    actor, ref = topology.models
    assert actor.groups == (
        ServerGroupSpec(WorkerType.PREFILL, 4, 2),
        ServerGroupSpec(WorkerType.DECODE, 8, 4, {"mem_fraction_static": 0.7}),
    )
    assert [spec.num_engines for spec in actor.groups] == [2, 2]
    assert (actor.model_path, actor.updates_weights, actor.has_pd) == ("/m", True, True)
    assert ref.groups == (ServerGroupSpec(WorkerType.REGULAR, 4, 1),)
    assert (ref.model_path, ref.updates_weights, ref.has_pd) == ("/ref", False, False)
    assert topology.num_gpus == 16
    places = topology.places("/m")
    assert [(place.rank, place.first_slot, place.num_gpus) for place in places["actor"]] == [
        (0, 0, 2),
        (1, 2, 2),
        (2, 4, 4),
        (3, 8, 4),
    ]
    assert [(place.rank, place.first_slot) for place in places["ref"]] == [(4, 12), (5, 13), (6, 14), (7, 15)]
    assert places["actor"][2].overrides == {"mem_fraction_static": 0.7}
    assert places["ref"][0].overrides == {"model_path": "/ref"}
    assert actor.num_answering == 2, "those that decode"
    assert "mem-fraction-static is read as mem_fraction_static" in topology.warnings[0]


def test_a_model_of_another_path_keeps_its_weights_and_says_so(read):
    topology = read("sglang: [{name: a, model_path: /x, server_groups: []}]")
    assert not topology.models[0].updates_weights
    assert "keeps its weights" in topology.warnings[0]
    assert read("sglang: [{name: a, model_path: /m}]").models[0].updates_weights
    assert read("sglang: [{name: a, model_path: /x, update_weights: true}]").models[0].updates_weights


def test_a_placeholder_takes_devices_and_has_no_engines(read):
    (model,) = read(group(worker_type="placeholder", num_gpus=3, num_gpus_per_engine=2)).models
    assert (model.groups[0].num_gpus, model.groups[0].num_engines) == (3, 0)


def test_the_engines_behind_a_placeholder_stand_on_the_devices_after_it(read):
    groups = "{worker_type: placeholder, num_gpus: 3}, {worker_type: regular, num_gpus: 2}"
    topology = read(f"sglang: [{{name: a, server_groups: [{groups}]}}]")
    assert [(place.rank, place.first_slot) for place in topology.places("/m")["a"]] == [(0, 3), (1, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "the root must be a mapping with the key sglang, a list of models"),
        ("sglang: {}", "the root must be a mapping with the key sglang, a list of models"),
        ("sglang: [3]", "model 0: must be a mapping, not 3"),
        ("sglang: [{server_groups: []}]", "model 0: key name: None must be the model's name"),
        ("sglang: [{name: a}, {name: a}]", "two models are named 'a'"),
        ("sglang: [{name: a, server_groups: 3}]", "model a: key server_groups: 3 must be a list"),
        ("sglang: [{name: a, server_groups: [3]}]", "model a, group 0: must be a mapping, not 3"),
        (
            "sglang: [{name: a, update_weights: maybe}]",
            "model a: key update_weights: 'maybe' is neither true nor false",
        ),
        (group(worker_type="regula"), "key worker_type: 'regula' is not one of regular, prefill, decode, encoder"),
        (group(num_gpus=None), "model a, group 0: key num_gpus: None must be a whole number of at least 1"),
        (group(num_gpus=0), "key num_gpus: 0 must be a whole number"),
        (group(num_gpus_per_engine=3), "key num_gpus: 4 must be a multiple of num_gpus_per_engine 3"),
        (group(gpus=1), "unknown key gpus; known are worker_type, num_gpus"),
        (group(overrides={"context_lenth": 1}), "has no field context_lenth. Did you mean context_length?"),
        (group(overrides={"page_size": "x"}), "overrides: page_size: 'x' is not an integer"),
        (group(overrides={"port": 1}), "overrides: port cannot be set: slime chooses the addresses"),
        (
            group(overrides={"disaggregation_mode": "decode"}),
            "disaggregation_mode cannot be set: it follows from worker",
        ),
        (group(overrides={"tp_size": 1}), "overrides: tp_size cannot be set: it follows from num_gpus_per_engine"),
        (group(overrides={"pp_size": "x"}), "overrides: pp_size: 'x' is not an integer"),
        (group(overrides={"stat_loggers": 1}), "overrides: stat_loggers: it has no option"),
        (group(overrides=3), "key overrides: 3 must be a mapping"),
    ],
)
def test_a_mistake_names_file_model_group_and_key(read, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert problem.startswith("--sglang-config /")
    assert "engines.yaml: " in problem
    assert message in problem


def test_every_mistake_of_a_file_is_in_one_message(read):
    with pytest.raises(ConfigError) as caught:
        read("sglang: [{name: a, server_groups: [{worker_type: x, num_gpus: 0}, {num_gpus: 1}]}, {}]")
    assert len(caught.value.problems) == 4


def test_groups_of_one_model_must_serve_one_checkpoint(read):
    with pytest.raises(ConfigError, match="model a: its groups serve different models: /m, /x"):
        read(
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 1}, "
            "{worker_type: regular, num_gpus: 1, overrides: {model_path: /x}}]}]"
        )


def args(**changes: Any) -> Namespace:
    values = {"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 8, "hf_checkpoint": "/m", "sglang_config": None}
    return Namespace(**values | {"prefill_num_servers": None} | changes)


def test_without_a_file_there_is_one_group_of_regular_engines():
    topology = topology_of(args())
    assert topology.models[0].groups == (ServerGroupSpec(WorkerType.REGULAR, 8, 2),)
    assert topology_of(args(rollout_num_gpus=0)).models[0].groups == ()


def test_prefill_servers_leave_the_other_devices_to_decoding():
    groups = topology_of(args(prefill_num_servers=1)).models[0].groups
    assert groups == (ServerGroupSpec(WorkerType.PREFILL, 2, 2), ServerGroupSpec(WorkerType.DECODE, 6, 2))


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_overrides_know_the_older_names_that_flags_know(old: str, new: str, read):
    name = old.removeprefix("--").replace("-", "_")
    option = server_options().by_flag[new]
    value = option.choices[0] if option.choices else [1, 2] if option.nargs else 1
    topology = read(group(overrides={name: value}))
    assert topology.models[0].groups[0].overrides == {option.dest: value}
    assert name == option.dest or any(
        f"overrides: {name} is read as {option.dest}" in text for text in topology.warnings
    )


def test_overrides_take_the_names_of_options_and_drop_those_that_are_gone(read):
    topology = read(group(overrides={"data-parallel-size": 2, "enable_ep_moe": True}))
    assert topology.models[0].groups[0].overrides == {"dp_size": 2}
    assert any("enable_ep_moe is dropped: say --sglang-ep-size N" in text for text in topology.warnings)
    with pytest.raises(ConfigError, match="tp_size cannot be set"):
        read(group(overrides={"tensor_parallel_size": 2}))


def test_overrides_become_words_of_the_servers_command_line():
    fields = {"context_length": 8192, "cuda_graph_bs_decode": [1, 2], "enable_metrics": True, "page_size": -1}
    assert override_argv({**fields, "mem_fraction_static": None, "log_requests": False}) == (
        ["--context-length", "8192", "--cuda-graph-bs-decode", "1", "2", "--enable-metrics", "--page-size=-1"]
    )
    assert override_argv({"enable_dsa_fused_indexer": False}) == ["--no-enable-dsa-fused-indexer"]
    assert override_argv({"preferred_sampling_params": {"top_k": 3}}) == ["--preferred-sampling-params", '{"top_k": 3}']
