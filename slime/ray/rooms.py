"""The flags, derivations and rules of all rooms, in order: the tables that ``slime.ray.arguments`` works through.

Must stay importable without torch, ray, megatron and sglang.
"""

from __future__ import annotations

from slime.algorithms import arguments as algorithms
from slime.backends.fsdp_utils import arguments as fsdp
from slime.backends.megatron_utils import argument_rules as megatron_rules
from slime.backends.megatron_utils import arguments as megatron
from slime.backends.megatron_utils import optimizer_rules
from slime.backends.megatron_utils.server import arguments as server
from slime.backends.sglang_utils import rules as sglang_rules
from slime.backends.sglang_utils.namespace import EngineArgs
from slime.batch import arguments as batch
from slime.config.arguments import (
    AsyncArgs,
    CiArgs,
    ClusterArgs,
    CommandArgs,
    ConvenienceArgs,
    FaultToleranceArgs,
    NetworkArgs,
    SyncArgs,
)
from slime.config.check import Rule
from slime.config.groups import groups_in
from slime.config.resolve import Step
from slime.data import arguments as data
from slime.hooks import check_hooks
from slime.observability import arguments as observability
from slime.ray import rules as wiring_rules
from slime.rollout import arguments as rollout
from slime.rollout import rules as rollout_rules
from slime.weight_sync import rules as sync_rules

GROUPS: list[type] = [
    CommandArgs,
    ClusterArgs,
    SyncArgs,
    AsyncArgs,
    *groups_in(data, rollout, batch, algorithms),
    ConvenienceArgs,
    *groups_in(megatron, fsdp),
    EngineArgs,
    *groups_in(observability),
    FaultToleranceArgs,
    NetworkArgs,
    CiArgs,
    server.TeacherServerArgs,
]
GROUPS.append(megatron.other_flags(GROUPS))  # last: it leaves out the flags that rooms declare

# Derivations of other rooms, in order, after those of slime.config.resolve.
STEPS: tuple[Step, ...] = (
    *megatron_rules.STEPS,
    wiring_rules.other_model_flags,
    *sglang_rules.STEPS,
    *rollout_rules.STEPS,
    wiring_rules.replaceable_processes,
)

# Derivations that ask external engines over the network.
LIVE_STEPS: tuple[Step, ...] = sglang_rules.LIVE_STEPS

RULES: tuple[Rule, ...] = (
    *wiring_rules.MODEL_RULES,
    *sglang_rules.RULES,
    *wiring_rules.RULES,
    *rollout_rules.RULES,
    *wiring_rules.ROLE_RULES,
    *sync_rules.RULES,
    *wiring_rules.CI_RULES,
    server.unused,
)

# Requirements on the machine that starts the run. A plan works on any machine and lists them separately.
MACHINE_RULES: tuple[Rule, ...] = (
    optimizer_rules.low_precision_here,
    *sglang_rules.MACHINE_RULES,
    *wiring_rules.MACHINE_RULES,
)

# Rules that load functions of the user.
HOOK_RULES: tuple[Rule, ...] = (
    check_hooks,
    *rollout_rules.HOOK_RULES,
    *wiring_rules.ROLE_HOOK_RULES,
)
