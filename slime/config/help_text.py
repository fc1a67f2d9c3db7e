"""The texts of ``--help``: the most used flags, all flags, and their layout at the width of the terminal."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence

from slime.config.groups import json_object

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
