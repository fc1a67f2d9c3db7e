"""How the trainer's ranks are laid out, as far as splitting a batch needs to know. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slime.utils.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes that decide which rank gets which samples.

    Attributes:
        dp_size: data-parallel ranks, context parallelism not counted. Each gets its own samples.
        cp_size: context-parallel ranks, which share the tokens of every sample.
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

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        tensor: int,
        pipeline: int,
        context: int,
        virtual_stages: int | None = None,
        group_size: int | None = None,
    ) -> ParallelLayout:
        """The layout of ``world_size`` ranks, of which ``tensor * pipeline * context`` share the same samples.

        Args:
            virtual_stages: per pipeline rank; None without interleaving.
            group_size: ``--microbatch-group-size-per-virtual-pipeline-stage``; None means ``pipeline``.

        Raises:
            ConfigError: the sizes do not divide ``world_size``.
        """
        shared = tensor * pipeline * context
        if world_size % shared:
            raise ConfigError(
                f"{world_size} trainer ranks cannot be divided into groups of {shared}, the product of "
                f"--tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline} and "
                f"--context-parallel-size {context}."
            )
        return cls(
            dp_size=world_size // shared,
            cp_size=context,
            vpp_size=virtual_stages or 1,
            microbatch_group_size_per_vp_stage=(group_size or pipeline) if virtual_stages else 1,
        )

    @property
    def microbatch_multiple(self) -> int:
        """The micro-batches of a step, all ranks together, must be a multiple of this."""
        return self.dp_size * (self.microbatch_group_size_per_vp_stage if self.vpp_size > 1 else 1)
