"""Every Megatron flag that launch scripts or slime's users know parses, and lands where Megatron puts it."""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils import arguments
from slime.backends.megatron_utils.arguments import core_options, other_flags
from slime.config.groups import add_group, flags_of, groups_in, ignored_flags, unsupported_flags
from slime.config.parse import build_parser
from slime.ray.arguments import GROUPS
from tools.make_megatron_options import OUTPUT, read_options

_TABLE = Path(__file__).parents[2] / "contracts" / "megatron_flags.csv"
ROWS = list(csv.DictReader(_TABLE.open(encoding="utf-8")))

_DERIVED = """
    num_query_groups normalization layernorm_epsilon position_embedding_type rotary_base rotary_percent mscale
    rotary_scaling_factor mscale_all_dim kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim moe_layer_freq
    moe_router_topk moe_router_score_function
"""
"""None until the model of --hf-checkpoint is known."""
_OUR_DEFAULTS: dict[str, Any] = {
    # decided by the checkpoint
    **dict.fromkeys(_DERIVED.split()),
    # resolved later, from other flags
    "distributed_backend": None,
    "use_distributed_optimizer": None,
    "bf16": False,
    "seq_length": None,
    "max_position_embeddings": None,
    "tokenizer_model": None,
    # every launch script passes 0: dropout would change log-probs between the old and the new policy
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # what runs, whatever is asked for
    "moe_token_dispatcher_type": "alltoall",
    # TransformerEngine is not installed by default
    "transformer_impl": "local",
    # slow loads and first compilations of one rank must not end a run
    "distributed_timeout_minutes": 30.0,
    # one way to say "nothing"
    "moe_router_load_balancing_type": None,
    "moe_aux_loss_coeff": None,
    "moe_router_bias_update_rate": None,
    "no_load_optim": False,
    "no_load_rng": False,
    "use_cpu_initialization": False,
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser(GROUPS)


def _typed(row: dict[str, str], text: str) -> Any:
    kind = row["type"]
    if kind.endswith((" *", " +")):
        return [_typed(row | {"type": kind[:-2]}, text)]
    return {"int": int, "float": float}.get(kind, str)(text)


def _values(row: dict[str, str]) -> list[str]:
    """The values of launch scripts and all choices, else one value of the right type."""
    values = [*row["examples"].split(), *filter(None, row["choices"].split("|"))]
    return values or {"int": ["3"], "float": ["0.5"]}.get(row["type"].split()[0], ["text"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["type"]], ids=lambda row: row["flag"])
def test_a_flag_of_launch_scripts_lands_on_megatrons_name(row: dict[str, str], parser: argparse.ArgumentParser) -> None:
    if row["type"].startswith("flag"):
        args, unknown = parser.parse_known_args([row["flag"]])
        assert (getattr(args, row["dest"]), unknown) == ("stores False" not in row["type"], [])
        return
    for text in _values(row):
        args, unknown = parser.parse_known_args([row["flag"], text])
        assert (getattr(args, row["dest"]), unknown) == (_typed(row, text), [])


@pytest.mark.parametrize("row", [row for row in ROWS if row["choices"]], ids=lambda row: row["flag"])
def test_a_value_that_megatron_does_not_have_is_refused(row: dict[str, str], parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ValueError, match=f"{row['flag']}.*invalid choice: 'nonsense'"):
        parser.parse_known_args([row["flag"], "nonsense"])


@pytest.mark.parametrize("row", [row for row in ROWS if not row["type"]], ids=lambda row: row["flag"])
def test_a_flag_that_only_users_code_reads_is_known(row: dict[str, str], parser: argparse.ArgumentParser) -> None:
    actions = parser._option_string_actions
    assert row["flag"] in actions
    assert actions[row["flag"]].dest == row["dest"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"])
def test_a_default_is_megatrons_or_a_difference_on_purpose(
    row: dict[str, str], parser: argparse.ArgumentParser
) -> None:
    default = parser.get_default(row["dest"])
    upstream = row["slime_default"] or row["megatron_default"]
    if row["dest"] in _OUR_DEFAULTS:
        assert default == _OUR_DEFAULTS[row["dest"]]
    else:
        try:
            assert default == ast.literal_eval(upstream)
        except ValueError:
            assert default == upstream


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] == "kernel"], ids=lambda row: row["flag"])
def test_a_flag_about_kernels_is_listed_as_ignored_and_no_error(
    row: dict[str, str], parser: argparse.ArgumentParser
) -> None:
    words = [row["flag"]] if row["type"].startswith("flag") else [row["flag"], _values(row)[0]]
    args = parser.parse_args(words)
    args.given = {row["dest"]}
    assert list(unsupported_flags(args, GROUPS)) == []
    assert [flag for flag, _ in ignored_flags(args, GROUPS)] == [row["flag"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--retro-add-retriever"], "--retro-add-retriever is not supported yet"),
        (["--train-samples", "7"], "--train-samples 7 is not supported yet"),
        (["--data-path", "a", "b"], r"--data-path \['a', 'b'\] is not supported yet"),
        (["--disable-mamba-mem-eff-path"], "--disable-mamba-mem-eff-path is not supported yet"),
        (["--tp-only-amax-red"], "--tp-only-amax-red is not supported yet"),
        (["--qk-clip"], "--qk-clip is not supported yet"),
    ],
)
def test_an_option_of_megatron_without_its_feature_is_an_error_by_name(
    words: list[str], message: str, parser: argparse.ArgumentParser
) -> None:
    args, unknown = parser.parse_known_args(words)
    assert unknown == []
    (problem,) = unsupported_flags(args, GROUPS)
    assert re.match(message, problem)


@pytest.mark.parametrize(
    "words", [["--use-mcore-models"], ["--ddp-num-buckets", "5"], ["--num-workers", "2"], ["--log-interval", "1"]]
)
def test_an_option_that_changes_nothing_here_is_told_as_ignored(
    words: list[str], parser: argparse.ArgumentParser
) -> None:
    args = parser.parse_args(words)
    args.given = {words[0].removeprefix("--").replace("-", "_")}
    assert list(unsupported_flags(args, GROUPS)) == []
    assert [flag for flag, _ in ignored_flags(args, GROUPS)] == words[:1]


def test_no_default_command_asks_for_something_that_does_not_exist(parser: argparse.ArgumentParser) -> None:
    assert list(unsupported_flags(parser.parse_args([]), GROUPS)) == []


def test_a_flag_that_a_room_declares_is_left_out_of_the_other_options() -> None:
    taken = {flag.name for flag in flags_of(GROUPS[:-1])}
    others = {flag.name for flag in flags_of(GROUPS[-1:])}
    assert not taken & others
    assert {"seed", "record_memory_history"} & taken
    assert "train_samples" in others


def test_other_options_step_back_for_whoever_declares_them_first() -> None:
    names = {flag.name for flag in flags_of([other_flags([])])}
    assert {"num_layers", "train_samples"} <= names
    fewer = {flag.name for flag in flags_of([other_flags([arguments.ModelArgs])])}
    assert names - fewer >= {"num_layers", "hidden_size"}
    parser = argparse.ArgumentParser()
    for group in (arguments.ModelArgs, other_flags([arguments.ModelArgs])):
        add_group(parser, group)  # argparse refuses a flag that is declared twice


def test_no_name_is_twice_in_the_table_of_launcher_options() -> None:
    table = (Path(arguments.__file__).parent / "launcher_options.csv").read_text(encoding="utf-8").splitlines()
    assert len({row.partition(",")[0] for row in table}) == len(table)


def test_every_option_that_changes_nothing_is_an_option() -> None:
    flags = list(flags_of([other_flags([]), arguments.RuntimeArgs]))
    known = {spelling for flag in flags for spelling in flag.spellings}
    with (Path(arguments.__file__).parent / "launcher_options.csv").open(encoding="utf-8", newline="") as file:
        assert {f"--{row['flag']}" for row in csv.DictReader(file) if row["no_effect"]} <= known


def test_the_options_of_megatron_core_are_those_of_the_installed_version() -> None:
    assert json.loads(OUTPUT.read_text(encoding="utf-8")) == read_options()


def test_core_options_follow_megatrons_own_renamings() -> None:
    flags = {option["dest"]: option["flags"] for option in core_options()}
    assert flags["layernorm_epsilon"] == ["--norm-epsilon"]
    assert flags["add_bias_linear"] == ["--disable-bias-linear"]
    assert flags["fp8"] == ["--fp8-format"]
    assert "activation_func" not in flags  # a function
    assert "params_dtype" not in flags


def test_megatrons_options_are_known_in_full(parser: argparse.ArgumentParser) -> None:
    """Megatron has about 660. slime's groups bring more."""
    declared = {flag for item in flags_of(groups_in(arguments)) for flag in item.spellings}
    others = {flag for item in flags_of(GROUPS[-1:]) for flag in item.spellings}
    assert len(declared | others) > 600


def test_the_flags_need_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, slime.backends.megatron_utils.arguments, slime.backends.megatron_utils.argument_rules, "
        "slime.backends.megatron_utils.transformer_config, slime.backends.training.checkpoint_source; "
        "bad = {'torch', 'megatron', 'transformers', 'ray', 'sglang'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
