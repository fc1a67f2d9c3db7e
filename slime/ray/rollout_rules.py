"""What slime's own rollout functions need of the command line; without these rules a run would say it once it is up.

Called by ``slime.ray.arguments`` after the flags are resolved. Rollout functions of users judge for themselves.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils.errors import ConfigError

__all__ = ["FULLY_ASYNC", "HOOK_RULES", "RULES"]

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"


def _evaluation(args: Namespace) -> Iterator[str]:
    """E29."""
    evaluates = bool(args.eval_datasets) and args.eval_interval is not None and not args.debug_train_only
    if evaluates and _dotted(args.eval_function_path) == FULLY_ASYNC:
        yield (
            f"--eval-function-path {args.eval_function_path} cannot evaluate: its worker never stops. Give "
            f"--eval-function-path {DEFAULT_ROLLOUT_FUNCTION}."
        )


def _supervised(args: Namespace) -> Iterator[str]:
    """D17."""
    if _dotted(args.rollout_function_path) != _SUPERVISED or args.load_debug_rollout_data is not None:
        return
    if args.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt {args.n_samples_per_prompt} must be 1: --rollout-function-path {_SUPERVISED} "
            "trains on every row once."
        )
    if not args.rollout_global_dataset:
        yield f"--rollout-function-path {_SUPERVISED} reads --prompt-data: drop --disable-rollout-global-dataset."
    if args.apply_chat_template:
        yield (
            f"--apply-chat-template makes text of the messages that --rollout-function-path {_SUPERVISED} masks turn "
            "by turn: drop it."
        )


def _returned_groups(args: Namespace) -> Iterator[str]:
    """D15: groups that a rollout did not finish go back to the data source, which must take them."""
    from slime.hooks.load import load_function
    from slime.rollout.data_source import RolloutDataSource

    if _dotted(args.rollout_function_path) == FULLY_ASYNC:
        cause = f"--rollout-function-path {FULLY_ASYNC}"
    elif args.partial_rollout:
        cause = "--partial-rollout"
    else:
        return
    try:
        source = load_function(args.data_source_path, "data_source")
    except ConfigError:  # reported with the other functions
        return
    if getattr(source, "add_samples", None) is RolloutDataSource.add_samples:
        yield (
            f"--data-source-path {args.data_source_path} is read-only, but {cause} returns unfinished groups to it, "
            "which would be lost: use a source with a buffer, such as the default one."
        )


def _dotted(path: str) -> str:
    return path.replace(":", ".")


RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (_evaluation, _supervised)

HOOK_RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (_returned_groups,)
"""They load a function of the user."""
