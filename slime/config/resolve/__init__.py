"""Derived values: ordered steps, each with one subject. The only code that writes to ``args`` after parsing.

    paths        names, absolute paths, where weights come from and go to
    cluster      modes, devices, offloading, environment variables of launch scripts; batch sizes, length of the run,
                 lengths, evaluation, rewards
    objective    clipping, KL, normalization

A step looks at local files at most. If it fills in a value that the user left open, it adds a notice
(:mod:`slime.config.groups`): a warning if the command probably meant something else. Some defaults differ from
Megatron's, so that older launch scripts keep working.

Called by ``slime.ray.arguments``, which adds the steps that only other rooms know.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from slime.config.resolve import cluster, objective, paths

Step = Callable[[Namespace], None]

# In this order: a step reads values that earlier steps derive.
STEPS: tuple[Step, ...] = (
    paths.experiment_name,
    paths.absolute_paths,
    paths.usable_names,
    paths.debug_dumps,
    cluster.modes,
    cluster.critic,
    cluster.offloading,
    cluster.devices,
    cluster.node_borders,
    cluster.rollout_batch,
    cluster.group_size,
    cluster.global_batch,
    cluster.micro_batch_budget,
    cluster.run_length,
    cluster.lengths,
    cluster.evaluation,
    cluster.reward_keys,
    objective.learning_rate,
    objective.clipping,
    objective.kl_estimator,
    objective.unread,
    objective.group_normalization,
    objective.true_on_policy,
    objective.routing_replay,
    objective.recomputation,
    paths.saving,
    paths.initial_weights,
    paths.reference,
    cluster.allocator,
    cluster.unread_variables,
)


def resolve(args: Namespace, more_steps: Sequence[Step] = ()) -> None:
    """Derive all values from the given ones."""
    for step in (*STEPS, *more_steps):
        step(args)
