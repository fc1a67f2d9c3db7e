"""Argument groups: one field, one flag."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from slime.config.groups import add_group, flags_of, from_args, ignored_flags, unsupported_flags


@dataclass(frozen=True)
class ExampleArgs:
    """Example."""

    steps: int = field(default=3, metadata={"help": "steps"})
    rate: float | None = field(default=None, metadata={"help": "rate"})
    verbose: bool = field(default=False, metadata={"help": "talk"})
    bias: bool = field(default=True, metadata={"help": "bias", "off": "--disable-bias"})
    offload: bool | None = field(default=None, metadata={"help": "offload"})
    kind: Literal["a", "b"] = field(default="a", metadata={"help": "kind"})
    stops: list[str] | None = field(default=None, metadata={"help": "stops"})
    pairs: list[str] | None = field(default=None, metadata={"help": "pairs", "append": True})
    env: dict[str, Any] = field(default_factory=dict, metadata={"help": "env"})
    total: int = field(default=0, metadata={"derived": True})


def parse(*argv: str) -> ExampleArgs:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_group(parser, ExampleArgs)
    return from_args(ExampleArgs, parser.parse_args(argv))


def test_without_flags_every_field_has_its_default():
    assert parse() == ExampleArgs()


def test_each_annotation_becomes_the_matching_option():
    group = parse(
        *("--steps", "5", "--rate", "1e-3", "--verbose", "--disable-bias", "--no-offload", "--kind", "b"),
        *("--stops", "x", "y", "--env", '{"A": 1}'),
    )
    assert group == ExampleArgs(5, 1e-3, True, False, False, "b", ["x", "y"], None, {"A": 1}, 0)


def test_repeated_append_flags_add_up():
    assert parse("--pairs", "a", "b", "--pairs", "c").pairs == ["a", "b", "c"]


def test_two_parses_do_not_share_a_default():
    parse().env["leak"] = 1
    assert parse().env == {}


def test_a_derived_field_has_no_flag():
    with pytest.raises(SystemExit):
        parse("--total", "3")


def test_a_value_outside_the_choices_is_refused():
    with pytest.raises(SystemExit):
        parse("--kind", "c")


def test_a_plain_namespace_that_lacks_a_field_gives_its_default():
    assert from_args(ExampleArgs, argparse.Namespace(steps=7, foreign=1)) == ExampleArgs(steps=7)


@dataclass(frozen=True)
class UnfinishedArgs:
    """Unfinished."""

    depth: int = field(default=1, metadata={"help": "depth", "later": "nothing nests yet"})
    fused: bool = field(default=False, metadata={"help": "fused", "no_effect": "there is no kernel"})
    total: int = field(default=0, metadata={"derived": True})


def unfinished(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_group(parser, UnfinishedArgs)
    args = parser.parse_args(argv)
    args.given = frozenset(word[2:] for word in argv if word.startswith("--"))
    return args


def test_using_an_unfinished_flag_is_a_problem_and_its_default_is_none():
    assert list(unsupported_flags(unfinished("--depth", "1", "--fused"), [UnfinishedArgs])) == []
    assert list(unsupported_flags(unfinished("--depth", "2"), [UnfinishedArgs])) == [
        "--depth 2 is not supported yet: nothing nests yet. Leave it out."
    ]


def test_a_flag_without_effect_is_reported_only_when_given():
    assert list(ignored_flags(unfinished("--fused"), [UnfinishedArgs])) == [("--fused", "there is no kernel")]
    assert list(ignored_flags(unfinished(), [UnfinishedArgs])) == []


def test_the_flags_of_a_group_are_listed_without_its_derived_fields():
    assert [(flag.group, flag.name, flag.default) for flag in flags_of([UnfinishedArgs])] == [
        ("Unfinished", "depth", 1),
        ("Unfinished", "fused", False),
    ]
