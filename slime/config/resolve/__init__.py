"""Derived values: ordered steps, each with one subject. The only code that writes to ``args`` after parsing.

    paths        names and absolute paths           batches      batch sizes, length of the run
    cluster      modes, devices, offloading         generation   lengths, evaluation, rewards
    objective    what follows from the algorithm    checkpoints  where weights come from and go to
    environment  variables that launch scripts set

A step looks at local files at most. Wherever it replaces something that the user did not say, it leaves a notice
(:mod:`slime.config.notices`): a warning where the command probably meant something else. Comments name the decision
(D5, B34) that keeps older launch scripts working.

Called by ``slime.ray.arguments``, which adds the steps that only other rooms know.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from slime.config.resolve import batches, cluster, objective, paths

Step = Callable[[Namespace], None]

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
    batches.rollout_batch,
    batches.group_size,
    batches.global_batch,
    batches.micro_batch_budget,
    batches.run_length,
    batches.lengths,
    batches.evaluation,
    batches.reward_keys,
    objective.clipping,
    objective.kl_estimator,
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
    """Fill in everything that follows from what was given."""
    for step in (*STEPS, *more_steps):
        step(args)
