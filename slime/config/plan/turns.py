"""Device memory by phase if trainer and engines share devices. The order is in ``slime.ray.run.device_handoff``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from slime.config.plan.values import read

__all__ = ["Turn", "plan_turns"]


@dataclass(frozen=True)
class Turn:
    """One turn of a rollout, and what lies in device memory during it."""

    name: str
    engines: str
    trainer: str


def plan_turns(args: Namespace) -> list[Turn]:
    """The turns of one rollout, in order; none where everybody keeps what he has."""
    ends, moves = bool(read(args, "release_train")), bool(read(args, "offload_train"))
    releases = bool(read(args, "colocate")) and bool(read(args, "offload_rollout"))
    if read(args, "debug_rollout_only") or not (ends or moves or releases):
        return []
    everything = "weights, gradients, optimizer"
    away = "no process" if ends else "nothing: it is in host memory" if moves else everything
    has_engines = not read(args, "debug_train_only")
    awake, asleep = ("weights, KV cache", "nothing" if releases else "weights, KV cache") if has_engines else ("-", "-")
    turns = [Turn("rollout", awake, away)] if not read(args, "is_async") else []
    if read(args, "use_critic"):
        turns.append(Turn("training, critic", asleep, f"the critic's {everything}"))
    turns.append(Turn("training, saving", asleep, everything))
    if has_engines:
        trainer = "weights" if moves or ends else everything
        turns.append(Turn("weight sync", "weights" if releases else awake, trainer))
    return turns
