"""One call that makes stock megatron-core 0.16.1 usable on this machine. First thing in every trainer process."""

from __future__ import annotations

import functools
import warnings

from slime.backends.megatron_utils.patches import cpu_import, moe, pipeline, repairs
from slime.utils import accelerator

__all__ = ["install"]


@functools.cache
def install() -> None:
    """On cpu: rewrite megatron.core while it is imported. Everywhere: repair its defects. Idempotent.

    Must run before anything imports ``megatron.core``; it imports the parts that a trainer uses.
    """
    _silence_known_warnings()
    if accelerator.current().is_cpu:
        cpu_import.install()
        with cpu_import.light_import():
            _import_megatron()
    else:
        _import_megatron()
    repairs.repair_reduce()
    moe.repair_missing_transformer_engine()
    if accelerator.current().is_cpu:
        moe.repair_expert_dispatch_on_cpu()
        pipeline.repair_overlapped_sends_on_cpu()
    repairs.repair_save_writers()
    repairs.repair_mixed_precision_optimizers()
    repairs.repair_distributed_optimizer_checkpoints()


def _import_megatron() -> None:
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401


def _silence_known_warnings() -> None:
    """Megatron's own use of deprecated names, which says nothing to a user and is printed once per rank."""
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
