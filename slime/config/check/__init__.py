"""Rules over the resolved arguments. Every rule returns problems. The caller reports all of them in one message.

A problem is one sentence: the flag, its value, the rule, the fix. ``slime.ray.arguments`` passes in the rules of other
rooms (hooks, model shape, engines).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence

from slime.config.check import cluster, generation, numbers, objective, paths
from slime.config.yaml_file import overwritten_keys
from slime.utils.errors import SlimeError

Rule = Callable[[Namespace], Iterable[str]]

RULES: tuple[Rule, ...] = (
    overwritten_keys,
    *numbers.RULES,
    *cluster.RULES,
    *cluster.BATCH_RULES,
    *generation.RULES,
    *objective.RULES,
    *paths.CHECKPOINT_RULES,
    *paths.RULES,
    *paths.OVERLAP_RULES,
)


def find_problems(args: Namespace, more_rules: Sequence[Rule] = ()) -> list[str]:
    """Every problem of ``args``, in the order of the rules, each once."""
    problems: list[str] = []
    for rule in (*RULES, *more_rules):
        try:
            problems += rule(args)
        except SlimeError as error:  # a rule may call functions of the run, which raise
            problems += error.problems
    # Two rules may find the same problem.
    return list(dict.fromkeys(problems))
