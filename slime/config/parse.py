"""From argv to one flat namespace: slime's and Megatron's flags come from groups, the engine's from its own room.

Precedence: a flag on the command line > ``--custom-config-path`` YAML > the default. YAML values become parser defaults
*before* anything is derived, and are coerced to the type of the flag they name.

All problems found here are raised as one :class:`ConfigError`. An unknown flag is a warning with its nearest match
(older launch scripts carry some), an error under ``--strict-args``. It is never dropped in silence.

``--help`` lists the most used flags and ``--help-all`` every flag, at the width of the terminal.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slime.config.groups import Notice, add_group, json_object
from slime.config.yaml_file import FLAG, read_custom_config
from slime.utils.errors import ConfigError

HELP, HELP_ALL = "--help", "--help-all"
HINT = "did you mean"
UNKNOWN = "unknown flag"
USAGE = """%(prog)s --hf-checkpoint DIR --prompt-data FILE [flag ...]

  slime plan %(prog)s ...      show what the command will do
  slime doctor %(prog)s ...    check whether this machine can do it"""
# Without a terminal, as in a file. Longer lines than the second number are hard to read.
_WIDTH, _WIDEST, _NARROWEST = 100, 140, 40

MOST_USED = {
    "Model and data": "hf_checkpoint prompt_data input_key label_key apply_chat_template rollout_shuffle",
    "Rewards and turns": "rm_type custom_rm_path reward_key custom_generate_function_path",
    "Rollouts": "num_rollout num_epoch rollout_batch_size n_samples_per_prompt rollout_max_response_len "
    "rollout_temperature",
    "Training": "advantage_estimator lr global_batch_size num_steps_per_rollout use_kl_loss kl_loss_coef "
    "use_dynamic_batch_size max_tokens_per_gpu gradient_checkpointing train_backend fp32",
    "Devices": "actor_num_nodes actor_num_gpus_per_node rollout_num_gpus rollout_num_gpus_per_engine colocate "
    "tensor_model_parallel_size",
    "Evaluation": "eval_interval eval_prompt_data n_samples_per_eval_prompt",
    "Checkpoints": "load save save_interval save_hf ref_load",
    "Reports": "output_dir experiment_name use_wandb plan",
}
"""Group -> names of the flags that ``--help`` shows."""

_LONGEST_CHOICES = 40
_ALMOST = 0.1  # flags whose similarity differs by less are equally likely
_WORDS = {int: "N", float: "X", str: "TEXT"}


def nearest_flag(flag: str, known: Collection[str]) -> str | None:
    """The known flag of which ``flag`` may be a misspelling. Of several similar ones the most used."""
    near = difflib.get_close_matches(flag, known, n=3, cutoff=0.75)
    if not near:
        return None
    best = difflib.SequenceMatcher(None, near[0], flag).ratio()
    used = {f"--{name.replace('_', '-')}" for names in MOST_USED.values() for name in names.split()}
    likely = difflib.get_close_matches(flag, used & set(near), n=1, cutoff=max(0.0, best - _ALMOST))
    return (likely or near)[0]


class HelpFormatter(argparse.HelpFormatter):
    """argparse's own, without a usage of hundreds of flags and without ``FLAG_NAME FLAG_NAME``.

    One short word per value, defaults only if they have a content.
    """

    def __init__(self, prog: str) -> None:
        width = terminal_width()
        super().__init__(prog, max_help_position=min(40, width // 2), width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # flags stay whole

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _is_long_choice(action):
            return lambda count: ("CHOICE",) * count
        return super()._metavar_formatter(action, default_metavar)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if isinstance(action.type, type):
            return _WORDS.get(action.type, "VALUE")
        return "JSON" if action.type is json_object else "TEXT"

    def _get_help_string(self, action: argparse.Action) -> str:
        # argparse formats help texts with ``%``.
        text = (action.help or "").replace("%", "%%").replace("%%(", "%(")
        if _is_long_choice(action):
            text = f"{text} One of {', '.join(map(str, action.choices or ()))}."
        is_telling = action.default not in (None, argparse.SUPPRESS, [], {}, "") and not isinstance(
            action.default, bool
        )
        if action.option_strings and is_telling and "default" not in text.lower():
            text = f"{text} Default: {action.default}."
        return text


def _is_long_choice(action: argparse.Action) -> bool:
    return action.choices is not None and sum(len(str(choice)) + 1 for choice in action.choices) > _LONGEST_CHOICES


def asked_help(argv: Sequence[str]) -> str:
    """``--help``, ``--help-all`` or an empty text: the help that a command line asks for."""
    if HELP_ALL in argv:
        return HELP_ALL
    return HELP if HELP in argv or "-h" in argv else ""


def short_help(parser: argparse.ArgumentParser) -> str:
    """The most used flags."""
    actions = {action.dest: action for action in parser._actions}
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for title, names in MOST_USED.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names.split()])
        formatter.end_section()
    count = sum(action.help != argparse.SUPPRESS for action in parser._actions)
    formatter.add_text(f"{HELP_ALL} lists all {count} flags.")
    return formatter.format_help()


def terminal_width() -> int:
    """Columns of the terminal. 100 if the output is not one."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDTH, 24)).columns))


_NEGATIVE_NUMBER = re.compile(r"-\d|-\.\d")

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


@dataclass(frozen=True)
class EngineNamespace:
    """The engine's and the router's share of the command line, as their room read it.

    Attributes:
        rest: the tokens that are not theirs, in order.
        attributes: values that become readable as ``args.sglang_<name>`` and ``args.router_<name>``, defaults included.
        given: the names among ``attributes`` that the command line set.
        argv: the engine's flags for its parser, without prefix. ``router_argv``: the router's.
    """

    rest: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    argv: list[str] = field(default_factory=list)
    router_argv: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


ReadEngine = Callable[[Sequence[str], Collection[str]], EngineNamespace]
"""(tokens, option strings that slime declares itself and keeps) -> the engine's share."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, so that usage errors read like every other problem."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(
    groups: Sequence[type],
    add_arguments: AddArguments | None = None,
    program: str = "train.py",
    usage: str = USAGE,
) -> argparse.ArgumentParser:
    """The parser of ``program``. ``add_arguments`` is the user's hook: it may add flags before slime adds its own."""
    parser: argparse.ArgumentParser = _Parser(
        prog=program,
        description="Reinforcement learning of a language model. --sglang-<flag> passes any SGLang server flag on.",
        # An abbreviation would become ambiguous when a flag is added.
        allow_abbrev=False,
        usage=usage,
        formatter_class=HelpFormatter,
    )
    if add_arguments is not None:
        parser = add_arguments(parser)
    for group in groups:
        add_group(parser, group)
    return parser


def parse(
    argv: Sequence[str],
    groups: Sequence[type],
    *,
    read_engine: ReadEngine,
    add_arguments: AddArguments | None = None,
    program: str = "train.py",
    usage: str = USAGE,
) -> argparse.Namespace:
    """Parse ``argv``, the words after ``program``.

    Returns:
        The namespace before any derivation, with attributes more: ``given`` (names that a flag or the YAML file set),
        ``custom_keys`` (keys of the file that are not flags), ``notices`` and ``sglang_argv``/``router_argv``.

    Raises:
        ConfigError: bad values, words that belong to no flag, an unreadable YAML file, unknown engine flags.
    """
    parser = build_parser(groups, add_arguments, program, usage)
    if is_asked := asked_help(argv):  # now, while the parser still has its defaults
        # Other programs have few flags, or list those of Megatron only.
        is_short = is_asked == HELP and usage == USAGE and add_arguments is None
        print(short_help(parser) if is_short else parser.format_help(), end="")
        raise SystemExit(0)
    known = parser._option_string_actions
    config = read_custom_config(_custom_config_path(argv), parser._actions)
    engine = read_engine([*config.engine_words, *argv], known)  # first the file's: a later flag beats them
    by_flag = _given(parser, engine.rest)
    # A flag on the command line takes precedence over the file.
    from_file = {name: value for name, value in (config.defaults | config.extra).items() if name not in by_flag}
    _set_defaults(parser, from_file)
    args, unknown = parser.parse_known_args(engine.rest)
    notices, strays = _unknown(unknown, known)
    problems = engine.problems + [f"{token!r} is not the value of any flag." for token in strays]
    if problems:
        raise ConfigError(problems)
    args.given = frozenset(by_flag | from_file.keys() | engine.given)
    args.notices = [*config.notices, *engine.notices, *notices]
    args.sglang_argv, args.router_argv = engine.argv, engine.router_argv
    for name, value in engine.attributes.items():
        setattr(args, name, value)
    args.custom_keys = config.extra
    return args


def _given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """Names whose flag is on the command line: parsed once more without defaults."""
    before = {action: (action.default, action.required) for action in parser._actions}
    # Values of ``set_defaults`` would count as given.
    inherited, parser._defaults = parser._defaults, {}
    try:
        for action in before:
            action.default, action.required = argparse.SUPPRESS, False
        return set(vars(parser.parse_known_args(list(argv))[0]))
    finally:
        parser._defaults = inherited
        for action, (default, required) in before.items():
            action.default, action.required = default, required


def _unknown(tokens: Sequence[str], known: Collection[str]) -> tuple[list[Notice], list[str]]:
    """Split unconsumed words into unknown flags, with the words after them as their values, and stray words."""
    notices: list[Notice] = []
    strays: list[str] = []
    for token in tokens:
        if token == "--":
            strays.append(token)
            break
        # A negative number is a value.
        if token.startswith("-") and not _NEGATIVE_NUMBER.match(token):
            flag = token.split("=")[0]
            near = nearest_flag(flag, known)
            hint = f"{HINT} {near}?" if near else "nothing reads it."
            notices.append(Notice("warning", flag, f"{UNKNOWN}, ignored with its values; {hint}"))
        # After an unknown flag the word is taken for its value.
        elif not notices:
            strays.append(token)
    return notices, strays


def _custom_config_path(argv: Sequence[str]) -> str:
    """The value of ``--custom-config-path``: read first, because its file changes the defaults of all others."""
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument(FLAG, default="", dest="path")
    return str(first.parse_known_args(list(argv))[0].path)


def _set_defaults(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    """Make the file's values the parser's defaults."""
    for action in parser._actions:
        if action.dest in values:
            # The file gives the value of a required flag.
            action.required = False
    parser.set_defaults(**values)
