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

    Its checkpoints are in ``critic/`` under ``--save`` and ``--load``, unless the role's overrides name other
    directories.
    """
    # In the actor's directory the checkpoints of one role would replace those of the other.
    twin = role_args(args, "critic")
    if args.save is not None and twin.save == args.save:
        twin.save = str(Path(args.save) / _DIRECTORY)
    if args.load is not None and twin.load == args.load:
        # A --load without a critic: None makes it start from the weights of the policy, with a fresh head.
        own = Path(args.load) / _DIRECTORY
        twin.load = str(own) if own.is_dir() or args.load == args.save else None
    twin.save_hf = None
    return twin
