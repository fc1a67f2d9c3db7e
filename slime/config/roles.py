"""``--megatron-config-path``: values that differ between the training roles, applied to a copy of the arguments.

    megatron:
      - {name: default, role: actor, overrides: {lr: 1e-6}}
      - {name: default, role: critic, overrides: {lr: 1e-5, save: checkpoints/critic}}

Called by the checks and the start of a training group. A role without an entry inherits everything. Nothing is
derived again from an overridden value.
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from slime.config import groups
from slime.config.groups import flag_of
from slime.config.resolve.paths import PATH_FLAGS, absolute, absolute_hook
from slime.config.yaml_file import read_mapping
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Role = Literal["actor", "critic"]

_FLAG = "--megatron-config-path"
_KEYS = {"name", "role", "overrides", "args"}
_PLACEMENT = {"num_nodes", "num_gpus_per_node"}
_PATHS = {flag.name for flag in PATH_FLAGS if flag.is_of_role}
_TOPOLOGY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
# Values of the loop and the batches: with different values the roles would train different batches.
_OF_ALL_ROLES = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_steps_per_rollout",
    "num_rollout",
    "start_rollout_id",
    "advantage_estimator",
)

# Fixed values of a critic: no reference, no teacher, and a separate output layer.
_CRITIC: dict[str, Any] = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}


class NoRoles(ConfigError, AssertionError):
    """The file has no list of roles. Also an AssertionError: callers of older versions catch that."""


@dataclass(frozen=True)
class RoleConfig:
    """One entry of the file: the values that differ for ``role``."""

    role: Role
    name: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)


def read_roles(path: str) -> dict[str, RoleConfig]:
    """The entries of the file by role.

    Raises:
        ConfigError: with every problem of the structure: keys, roles, duplicates.
    """
    where = f"{_FLAG} {path}"
    root = read_mapping(_FLAG, path)
    entries = root.get("megatron")
    if not isinstance(entries, list):
        raise NoRoles(f"{where}: the file must have a top-level 'megatron' list of entries, not {entries!r}.")
    problems: list[str] = []
    roles: dict[str, RoleConfig] = {}
    for number, entry in enumerate(entries, start=1):
        place = f"{where}, entry {number}"
        found = list(_entry_problems(place, entry))
        problems += found
        if found:
            continue
        config = RoleConfig(entry["role"], str(entry.get("name") or ""), _normalized(entry))
        if config.role in roles:
            problems.append(f"{place}: there is an entry for {config.role} already; one role has one entry.")
        roles[config.role] = config
    if problems:
        raise ConfigError(problems)
    return roles


_PLAIN = (type(None), bool, int, float, str)


def role_args(args: Namespace, role: Role) -> Namespace:
    """A copy of the resolved ``args`` with the values of ``role``."""
    twin = copy.copy(args)
    # Roles must not share lists and dicts. Most values are plain, and deepcopy is slow with 1500 of them.
    vars(twin).update((name, copy.deepcopy(one)) for name, one in vars(args).items() if type(one) not in _PLAIN)
    path = args.megatron_config_path
    config = read_roles(path).get(role) if path is not None else None
    overrides = config.overrides if config is not None else {}
    if path is not None and config is None:
        logger.info("%s %s has no entry for the %s, which takes the command line's values", _FLAG, path, role)
    for name, value in overrides.items():
        # All roles are placed like the actor.
        if name not in _PLACEMENT:
            setattr(twin, name, _absolute(_coerce(value, vars(args).get(name)), name))
    if role == "critic":
        if path is not None:
            vars(twin).update(_CRITIC)
        if "disable_param_buffers_cpu_backup" not in overrides:
            twin.disable_param_buffers_cpu_backup = False
    return twin


def parse_megatron_role_args(base_args: Namespace, megatron_config_path: str, role: Role) -> Namespace:
    """:func:`role_args` with the file as an argument, for users' drivers."""
    args = copy.copy(base_args)
    args.megatron_config_path = megatron_config_path
    return role_args(args, role)


def check_roles(args: Namespace) -> Iterator[str]:
    """Rule over the resolved arguments: the entries, and that all roles are laid out alike."""
    if args.megatron_config_path is None:
        return
    where = f"{_FLAG} {args.megatron_config_path}"
    for role, config in read_roles(args.megatron_config_path).items():
        for name, value in config.overrides.items():
            if name in _PLACEMENT:
                groups.info(args, _FLAG, f"{role}: {name} has no effect, all roles are placed like the actor")
            elif wrong := _type_problem(value, vars(args).get(name)):
                yield f"{where}: {role}: {name}: {value!r} {wrong}."
            elif name in _OF_ALL_ROLES and _coerce(value, vars(args)[name]) != vars(args)[name]:
                yield f"{where}: {role}: {name} {value} holds for all roles: set {flag_of(name)} instead."
            elif name in _TOPOLOGY and _coerce(value, vars(args)[name]) != vars(args)[name]:
                yield (
                    f"{where}: {role}: {name} {value} differs from {flag_of(name)} {vars(args)[name]}: all roles "
                    f"share one layout. Set the flag instead."
                )
            elif name not in vars(args):
                groups.warn(args, _FLAG, f"{role}: nothing that slime knows reads {name}")
        if role == "critic" and not args.use_critic:
            groups.warn(args, _FLAG, f"the critic's entry has no effect: {args.advantage_estimator} has no critic")
        if role == "critic" and args.save is not None and _absolute(config.overrides.get("save"), "save") == args.save:
            yield f"{where}: critic: save {args.save} is the actor's --save, and one would overwrite the other."


def _coerce(value: Any, current: Any) -> Any:
    """A YAML value with the type of the attribute that it replaces. 1e-5 is text in YAML 1.1 but a number here."""
    if not isinstance(value, str):
        # Not isinstance: bool is a subclass of int.
        return float(value) if isinstance(current, float) and type(value) is int else value
    if isinstance(current, bool):
        truth = yaml.safe_load(value.lower())
        return truth if isinstance(truth, bool) else value
    if isinstance(current, str):
        return value
    for convert in (int, float) if current is None or isinstance(current, int) else (float,):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _type_problem(value: Any, current: Any) -> str | None:
    """The reason why ``value`` cannot replace ``current``. Any value can replace None."""
    new = _coerce(value, current)
    match current:
        case bool():
            return None if isinstance(new, bool) else "is neither true nor false"
        case int():
            return None if type(new) is int else "is not a whole number"
        case float():
            return None if type(new) in (int, float) else "is not a number"
        case str():
            return None if new is None or isinstance(new, str) else "is not text"
        case _:
            return None


def _absolute(value: Any, name: str) -> Any:
    """Paths as absolute paths, because workers have another working directory."""
    if name in _PATHS and isinstance(value, str):
        return absolute(value)
    return absolute_hook(value) if name.endswith("_path") else value


def _entry_problems(place: str, entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{place} must be a mapping with role and overrides, not {entry!r}."
        return
    if unknown := sorted(str(key) for key in entry if key not in _KEYS):
        yield f"{place}: unknown key {', '.join(unknown)}; known keys: {', '.join(sorted(_KEYS))}."
    if entry.get("role") not in get_args(Role):
        yield f"{place}: role {entry.get('role')!r} is not one of {', '.join(get_args(Role))}."
    for key in ("overrides", "args"):
        if not isinstance(entry.get(key) or {}, dict):
            yield f"{place}: {key} must be a mapping of names to values, not {entry[key]!r}."


def _normalized(entry: dict[str, Any]) -> dict[str, Any]:
    """Overrides by attribute name. ``args`` is the older name of ``overrides``."""
    return {
        str(key).replace("-", "_"): value for key, value in (entry.get("overrides") or entry.get("args") or {}).items()
    }


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
