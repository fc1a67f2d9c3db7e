"""Rewards. ``async_rm`` scores a sample, ``batched_async_rm`` a group; the rules are one file each."""

from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.rules import compute_gpqa_reward, f1_score, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.rules import compute_score as compute_score_dapo
from slime.rollout.rm_hub.scoring import async_rm, batched_async_rm, known_rm_types, remote_rm

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "known_rm_types",
    "remote_rm",
]
