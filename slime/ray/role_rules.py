"""The rules of the trainer, once more for what ``--megatron-config-path`` makes of the arguments of each role.

Called by ``slime.ray.arguments`` after the flags are resolved. :func:`slime.config.roles.check_roles` judges the file
itself, and comes first: what it refuses is not looked at here.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator

from slime.backends.training.checkpoint_source import check_checkpoints
from slime.backends.training.export_files import check_export
from slime.config.check import numbers, overlaps
from slime.config.roles import check_roles, read_roles, role_args
from slime.hooks.load import check_hooks
from slime.ray import trainer_rules
from slime.utils.errors import ConfigError

__all__ = ["HOOK_RULES", "RULES"]

_RULES = (*numbers.RULES, *overlaps.RULES, *trainer_rules.RULES, check_checkpoints, check_export)


def _roles(args: Namespace) -> Iterator[str]:
    """What a role breaks and the command line does not."""
    return _new_problems(args, lambda view: [problem for rule in _RULES for problem in rule(view)])


def _role_hooks(args: Namespace) -> Iterator[str]:
    """Functions that only a role names."""
    return _new_problems(args, check_hooks)


def _new_problems(args: Namespace, find: Callable[[Namespace], list[str]]) -> Iterator[str]:
    path = args.megatron_config_path
    if path is None or args.debug_rollout_only:
        return
    same = copy.deepcopy(args)  # the rules leave their notices with the command line once already
    try:
        entries = read_roles(path).values()
        if list(check_roles(same)):
            return
    except ConfigError:
        return
    known = set(find(same))
    for entry in entries:
        if entry.role == "critic" and not args.use_critic:
            continue
        for problem in find(role_args(args, entry.role)):
            if problem not in known:
                yield f"--megatron-config-path {path}: {entry.role}: {problem}"


RULES = (_roles,)
HOOK_RULES = (_role_hooks,)
"""The rules that load functions of the user."""
