"""--eval-config: the file's structure, the origin of a field, and the errors."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.eval_config import EvalDatasetConfig, build_eval_datasets, unused_fields
from slime.utils.errors import ConfigError


def args(path: Path, **more: Any) -> Namespace:
    values: dict[str, Any] = {
        "eval_config": str(path), "eval_prompt_data": None, "rollout_temperature": 1.0, "eval_temperature": None,
        "n_samples_per_eval_prompt": 2, "input_key": "input", "eval_input_key": "question", "rollout_stop": ["\n"],
        "custom_rm_path": "pkg.reward", "multimodal_keys": {"image": "images"}, "rollout_max_response_len": 9,
    }  # fmt: skip
    return Namespace(**(values | more))


def build(tmp_path: Path, text: str, **more: Any) -> list[EvalDatasetConfig]:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return build_eval_datasets(args(path, **more))


LIST = "datasets: [{name: a, path: a.jsonl, top_p: 0.5}, {name: b, path: b.jsonl}]"
MAPPING = "datasets: {a: {path: a.jsonl, top_p: 0.5}, key: {name: b, path: b.jsonl}}"


@pytest.mark.parametrize("text", [LIST, MAPPING, f"eval: {{{LIST}}}", f"eval:\n  {MAPPING}\n  note: ignored"])
def test_sets_are_a_list_or_a_mapping_at_the_root_or_below_eval(text: str, tmp_path: Path):
    first, second = build(tmp_path, text)
    assert (first.name, first.path, first.top_p, first.is_from_file) == ("a", "a.jsonl", 0.5, True)
    assert (second.name, second.path, second.top_p) == ("b", "b.jsonl", None)


def test_a_file_in_json_is_yaml(tmp_path: Path):
    (only,) = build(tmp_path, '{"eval": {"datasets": [{"name": "a", "path": "x", "n_samples_per_eval_prompt": 16}]}}')
    assert only.n_samples_per_eval_prompt == 16


def test_a_field_comes_from_the_set_then_the_defaults_then_the_flags(tmp_path: Path):
    text = "defaults: {temperature: 0.3, rm_type: math, top_p: 0.7}\n"
    text += "datasets: [{name: a, path: x, temperature: 0.1}, {name: b, path: x}]"
    first, second = build(tmp_path, text)
    assert (first.temperature, second.temperature, second.rm_type, second.top_p) == (0.1, 0.3, "math", 0.7)
    assert (second.input_key, second.n_samples_per_eval_prompt, second.max_response_len) == ("question", 2, 9)
    assert (second.stop, second.custom_rm_path, second.multimodal_keys) == (["\n"], "pkg.reward", {"image": "images"})
    assert build(tmp_path, "datasets: [{name: a, path: x}]")[0].rm_type is None


def test_null_counts_as_said(tmp_path: Path):
    text = "defaults: {stop: [x], custom_rm_path: null}\ndatasets: [{name: a, path: x, stop: null}]"
    (only,) = build(tmp_path, text)
    assert (only.stop, only.custom_rm_path) == (None, None)
    assert build(tmp_path, "datasets: [{name: a, path: x, metadata_overrides: null}]")[0].metadata_overrides == {}


def test_numbers_are_numbers_however_yaml_reads_them(tmp_path: Path):
    text = "datasets: [{name: a, path: x, temperature: 1e-1, top_k: 20, max_response_len: 1e3, stop: END}]"
    (only,) = build(tmp_path, text.replace("1e3", "1.0e3"))
    assert (only.temperature, only.top_k, only.max_response_len, only.stop) == (0.1, 20, 1000, ["END"])


def test_references_are_followed(tmp_path: Path):
    text = "root: /data\ndatasets: [{name: a, path: '${root}/a.jsonl'}]"
    assert build(tmp_path, text)[0].path == "/data/a.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must hold a mapping"),
        ("eval: [1]", "eval must be a mapping with datasets"),
        ("eval: {defaults: {}}", "datasets is missing or empty"),
        ("datasets: []", "datasets is missing or empty"),
        ("datasets: gsm8k", "datasets must be a list or a mapping of names, not 'gsm8k'"),
        ("datasets: [x.jsonl]", "a set is a mapping with name and path, not 'x.jsonl'"),
        ("datasets: {a: x.jsonl}", "a set is a mapping with name and path, not 'a'"),
        ("defaults: [1]\ndatasets: [{name: a, path: x}]", "defaults must be a mapping"),
        ("defaults: {tempereture: 1}\ndatasets: [{name: a, path: x}]", "defaults: unknown key tempereture; known keys"),
        ("defaults: {path: x}\ndatasets: [{name: a}]", "defaults: unknown key path"),
        ("datasets: [{name: a, path: x, topp: 1}]", "set a: unknown key topp; known keys"),
        ("datasets: [{path: x}]", "set number 1: name is missing"),
        ("datasets: [{name: a}]", "set a: path is missing"),
        ("datasets: [{name: a, path: x}, {name: a, path: y}]", "names a more than once"),
        ("datasets: [{name: a, path: x, temperature: hot}]", "set a: temperature 'hot' must be a number"),
        ("datasets: [{name: a, path: x, top_k: many}]", "set a: top_k 'many' must be an integer"),
        ("datasets: [{name: a, path: x, metadata_overrides: [1]}]", r"metadata_overrides \[1\] must be a mapping"),
        ("datasets: [{name: a, path: x, apply_chat_template: 2}]", "apply_chat_template 2 must be true or false"),
        ("datasets: [{name: a, path: x, min_eval_samples: 0}]", "min_eval_samples 0 must be at least 1"),
        (
            "datasets: [{name: a, path: x, n_samples_per_eval_prompt: 0}]",
            "n_samples_per_eval_prompt 0 must be at least 1",
        ),
        ("datasets: [{name: a, path: '${nowhere}'}]", r"\$\{nowhere\} leads nowhere"),
    ],
)
def test_a_wrong_file_names_flag_file_set_and_key(text: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message) as caught:
        build(tmp_path, text)
    assert all(problem.startswith(f"--eval-config {tmp_path}") for problem in caught.value.problems)


def test_several_mistakes_come_together(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, "defaults: {a: 1}\ndatasets: [{name: x}, {name: x, path: y, b: 1}]")
    assert len(caught.value.problems) == 4


def test_fields_for_other_evaluation_functions_are_accepted_and_named(tmp_path: Path):
    (only,) = build(tmp_path, "datasets: [{name: a, path: x, app_service: 'http://x', reward_model: {k: 1}}]")
    assert unused_fields(only) == ["app_service", "reward_model"]
