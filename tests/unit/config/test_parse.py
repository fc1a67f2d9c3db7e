"""Parsing: three namespaces, YAML before derivation, and no flag dropped without a word."""

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime.config.arguments import CommandArgs
from slime.config.parse import EngineNamespace, nearest_flag
from slime.config.parse import parse as parse_argv
from slime.utils.errors import ConfigError


@dataclass(frozen=True)
class LoopArgs:
    """Loop."""

    lr: float = field(default=1e-6, metadata={"help": "learning rate"})
    num_rollout: int | None = field(default=None, metadata={"help": "rollouts"})
    sglang_router_ip: str | None = field(default=None, metadata={"help": "router"})

    names: list[str] | None = field(default=None, metadata={"help": "names", "append": True})
    quiet: bool = field(default=False, metadata={"help": "quiet"})


def read_engine(tokens: Sequence[str], own: Collection[str]) -> EngineNamespace:
    """An engine that knows one flag with one value."""
    rest, values = list(tokens), []
    while "--sglang-limit" in rest:
        at = rest.index("--sglang-limit")
        values.append(rest[at + 1])
        del rest[at : at + 2]
    for token in [item for item in rest if item.startswith("--sglang-limit=")]:
        rest.remove(token)
        values.insert(0, token.split("=")[1])
    given = frozenset({"sglang_limit"}) if values else frozenset()
    return EngineNamespace(rest, {"sglang_limit": values[-1] if values else None}, given, values)


def parse(*argv: str) -> Namespace:
    return parse_argv(argv, [LoopArgs, CommandArgs], read_engine=read_engine)


def test_an_unknown_flag_is_a_warning_that_names_the_nearest_one():
    (notice,) = parse("--num-rollouts", "3", "--lr", "1").notices
    assert (notice.level, notice.flag) == ("warning", "--num-rollouts")
    assert "did you mean --num-rollout?" in notice.text


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--max-respnse-len", "--rollout-max-response-len"),
        ("--eval-max-respnse-len", "--eval-max-response-len"),
        ("--rollout-max-prompt", "--rollout-max-prompt-len"),
        ("--nothing-like-it", None),
    ],
)
def test_of_similar_flags_the_most_used_one_is_named(flag: str, near: str | None) -> None:
    known = ["--eval-max-response-len", "--rollout-max-response-len", "--rollout-max-prompt-len"]
    assert nearest_flag(flag, known) == near


def test_every_unknown_flag_gets_its_own_warning_and_swallows_its_values():
    args = parse("--qqqq", "-5", "a", "--zzzz", "1", "--lr", "0.5")
    assert [notice.flag for notice in args.notices] == ["--qqqq", "--zzzz"]
    assert args.lr == 0.5


def test_a_word_that_belongs_to_no_flag_is_an_error():
    with pytest.raises(ConfigError, match="'stray' is not the value of any flag"):
        parse("stray", "--lr", "0.5")


def test_abbreviations_are_not_accepted():
    args = parse("--num-roll", "3")
    assert args.num_rollout is None
    assert args.notices[0].flag == "--num-roll"


def test_the_engine_takes_its_flags_and_ours_stay():
    args = parse("--sglang-limit", "512", "--lr", "0.1", "--sglang-router-ip", "::1")
    assert (args.sglang_argv, args.sglang_limit, args.lr, args.sglang_router_ip) == (["512"], "512", 0.1, "::1")


def test_given_holds_what_flags_the_file_or_the_engine_set_and_nothing_else(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("num_rollout: 3\n")
    args = parse("--lr", "1e-6", "--sglang-limit", "4", "--custom-config-path", str(path))
    assert args.given == {"lr", "num_rollout", "sglang_limit", "custom_config_path"}


def test_an_engine_key_of_the_yaml_file_reaches_the_engine_and_a_flag_beats_it(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("sglang_limit: 7\n")
    assert parse("--custom-config-path", str(path)).sglang_limit == "7"
    assert parse("--custom-config-path", str(path), "--sglang-limit", "9").sglang_limit == "9"


def test_a_repeatable_flag_replaces_the_list_of_the_yaml_file(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("names: [a, b]\n")
    assert parse("--custom-config-path", str(path)).names == ["a", "b"]
    assert parse("--custom-config-path", str(path), "--names", "c").names == ["c"]


@pytest.mark.parametrize(("word", "value"), [("true", True), ("'false'", False), ("no", False)])
def test_a_yaml_switch_understands_true_and_false_words(tmp_path: Path, word: str, value: bool):
    path = tmp_path / "config.yaml"
    path.write_text(f"quiet: {word}\n")
    assert parse("--custom-config-path", str(path)).quiet is value


def test_a_yaml_switch_refuses_other_words(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("quiet: maybe\n")
    with pytest.raises(ConfigError, match="key quiet: 'maybe' is neither true nor false"):
        parse("--custom-config-path", str(path))


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

    args = parse_argv(["--mine", "4"], [LoopArgs, CommandArgs], read_engine=read_engine, add_arguments=add)
    assert args.mine == 4


def test_config_errors_survive_a_pickle_round_trip():
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert error.problems == ["one", "two"]
    assert str(error).startswith("2 problems")
