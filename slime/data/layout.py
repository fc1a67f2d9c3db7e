"""How the trainer's ranks are laid out, as far as splitting a batch needs to know. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slime.utils.errors import ConfigError

__all__ = ["ParallelLayout"]


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes that decide which rank gets which samples.

    Attributes:
        dp_size: data-parallel ranks, context parallelism not counted. Each gets its own samples.
        cp_size: context-parallel ranks; they share the tokens of every sample.
        vpp_size: virtual pipeline stages per rank; 1 means no interleaving.
        microbatch_group_size_per_vp_stage: with interleaving, the micro-batches of a rank come in multiples of this.
    """

    dp_size: int
    cp_size: int = 1
    vpp_size: int = 1
    microbatch_group_size_per_vp_stage: int = 1

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigError(f"parallel layout: {item.name} is {getattr(self, item.name)}, it must be at least 1.")

    @property
    def microbatch_multiple(self) -> int:
        """The micro-batches of a step, all ranks together, must be a multiple of this."""
        return self.dp_size * (self.microbatch_group_size_per_vp_stage if self.vpp_size > 1 else 1)
