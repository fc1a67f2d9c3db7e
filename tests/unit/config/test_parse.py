"""Parsing: three namespaces, YAML before derivation, and no flag dropped without a word."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime.config.parse import parse as parse_argv
from slime.utils.errors import ConfigError


@dataclass(frozen=True)
class LoopArgs:
    """Loop."""

    lr: float = field(default=1e-6, metadata={"help": "learning rate"})
    num_rollout: int | None = field(default=None, metadata={"help": "rollouts"})
    sglang_router_ip: str | None = field(default=None, metadata={"help": "router"})


def parse(*argv: str) -> Namespace:
    return parse_argv(argv, [LoopArgs], sglang_flags=lambda: {"--context-length", "--enable-metrics", "--stop"})


def test_a_misspelled_flag_is_an_error_that_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown flag --num-rollouts\. Did you mean --num-rollout\?"):
        parse("--num-rollouts", "3")


def test_all_unknown_flags_are_reported_in_one_message():
    with pytest.raises(ConfigError) as caught:
        parse("--qqqq", "--zzzz", "1")
    assert "--qqqq" in str(caught.value)
    assert "--zzzz" in str(caught.value)


def test_abbreviations_are_not_accepted():
    with pytest.raises(ConfigError, match="--num-roll"):
        parse("--num-roll", "3")


def test_engine_flags_lose_their_prefix_and_become_attributes():
    args = parse(
        "--sglang-context-length", "512", "--lr", "0.1", "--sglang-enable-metrics", "--sglang-router-ip", "::1"
    )
    assert args.sglang_argv == ["--context-length", "512", "--enable-metrics"]
    assert (args.sglang_context_length, args.sglang_enable_metrics, args.lr) == (512, True, 0.1)
    assert args.sglang_router_ip == "::1"


def test_a_negated_engine_flag_keeps_its_meaning():
    args = parse("--no-sglang-enable-metrics")
    assert args.sglang_argv == ["--no-enable-metrics"]
    assert args.sglang_enable_metrics is False


def test_an_engine_flag_that_the_server_lacks_is_an_error():
    with pytest.raises(ConfigError, match="Did you mean --sglang-context-length"):
        parse("--sglang-context-lenght", "5")


def test_yaml_values_are_coerced_to_the_type_of_their_flag(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1e-5\nnum-rollout: '7'\nmy_own_key: [1, 2]\n")
    args = parse("--custom-config-path", str(path))
    assert (args.lr, args.num_rollout, args.my_own_key) == (1e-5, 7, [1, 2])


def test_an_explicit_flag_beats_the_yaml_file(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1e-5\n")
    assert parse("--lr", "0.5", "--custom-config-path", str(path)).lr == 0.5


def test_a_yaml_value_of_the_wrong_type_names_file_and_key(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("num_rollout: many\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: key num_rollout: 'many'"):
        parse("--custom-config-path", str(path))


def test_a_missing_yaml_file_names_the_flag():
    with pytest.raises(ConfigError, match=r"--custom-config-path /nowhere\.yaml"):
        parse("--custom-config-path", "/nowhere.yaml")


def test_users_may_add_their_own_flags():
    def add(parser):
        parser.add_argument("--mine", type=int, default=1)
        return parser

    args = parse_argv(["--mine", "4"], [LoopArgs], sglang_flags=set, add_arguments=add)
    assert args.mine == 4


def test_config_errors_survive_a_pickle_round_trip():
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert error.problems == ["one", "two"]
    assert str(error).startswith("2 problems")
