"""Functions of the user around the trainer's passes. Loaded once per process by ``actor``, which calls them.

flag                                             called as
--custom-megatron-init-path                      f(args)
--custom-megatron-before-log-prob-hook-path      f(args, model, store_prefix)
--custom-megatron-before-train-step-hook-path    f(args, rollout_id, step_id, model, optimizer, scheduler)
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.backends.training.arguments import PluginArgs
from slime.config.groups import from_args
from slime.hooks.load import load_function

if TYPE_CHECKING:
    from slime.backends.megatron_utils.step import TrainState


@dataclass(frozen=True)
class TrainerHooks:
    """The user's functions. None if the flag is not given."""

    args: Namespace
    init: Callable[..., Any] | None = None
    log_prob: Callable[..., Any] | None = None
    train_step: Callable[..., Any] | None = None

    @classmethod
    def load(cls, args: Namespace) -> TrainerHooks:
        """Load the functions that ``args`` names.

        Raises:
            ConfigError: a path that cannot be loaded.
        """
        paths = from_args(PluginArgs, args)

        def function(path: str | None) -> Callable[..., Any] | None:
            return None if path is None else load_function(path)

        return cls(
            args,
            init=function(paths.custom_megatron_init_path),
            log_prob=function(paths.custom_megatron_before_log_prob_hook_path),
            train_step=function(paths.custom_megatron_before_train_step_hook_path),
        )

    def after_init(self) -> None:
        """Call the first hook. The process groups exist, the model does not."""
        if self.init is not None:
            self.init(self.args)

    def before_log_probs(self, state: TrainState, store_prefix: str) -> None:
        """Call the second hook. The model holds the weights whose log-probs (columns ``<store_prefix>log_probs``) or
        values are computed next."""
        if self.log_prob is not None:
            self.log_prob(self.args, state.chunks, store_prefix)

    def before_step(self, state: TrainState, rollout_id: int, step: int) -> None:
        """Call the third hook. Gradients are zero, the step's first forward pass is next."""
        if self.train_step is not None:
            self.train_step(self.args, rollout_id, step, state.chunks, state.optimizer, state.scheduler)
