"""The critic's command line: the actor's, with separate checkpoints. Called by ``loop`` if there is a critic."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.config.roles import role_args

_DIRECTORY = "critic"


def needs_critic(args: Namespace) -> bool:
    """Whether the run trains a value function beside the policy."""
    return bool(args.use_critic and args.num_rollout != 0)


def critic_args(args: Namespace) -> Namespace:
    """A copy of ``args`` for the critic, with its overrides from ``--megatron-config-path``.

    Its checkpoints lie in ``critic/`` under ``--save`` and ``--load``, unless the role's overrides name directories of
    their own: in the actor's directory one of the two would replace the other. From a ``--load`` without a critic the
    critic does not start: it takes the weights that the policy started from, with a fresh head.
    """
    twin = role_args(args, "critic")
    if args.save is not None and twin.save == args.save:
        twin.save = str(Path(args.save) / _DIRECTORY)
    if args.load is not None and twin.load == args.load:
        own = Path(args.load) / _DIRECTORY
        twin.load = str(own) if own.is_dir() or args.load == args.save else None
    twin.save_hf = None
    return twin
