"""Speculative decoding on a CPU: flags of such engines, and rules about them. Imports no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from slime.data.served_adapter import serves_adapter
from slime.models.hf_shape import read_shape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

# A chain of drafts: SGLang reserves memory for a tree of them.
_FLAGS = {"--speculative-num-draft-tokens": "8", "--speculative-ngram-max-bfs-breadth": "1"}


def draft_flags(user: Sequence[str]) -> dict[str, str]:
    """SGLang's flags of an engine on a CPU for drafts, if the ``user``'s words turn them on. Those have priority."""
    return _FLAGS if {"NGRAM", "--speculative-algorithm=NGRAM"} & set(user) else {}


def drafts_on_cpu(args: Namespace) -> Iterator[str]:
    """Engines on a CPU draft from history alone, for models with ordinary attention."""
    algorithm = args.sglang_speculative_algorithm
    if not algorithm or args.rollout_external_engine_addrs or args.debug_train_only:
        return
    if not accelerator.current().is_cpu:
        return
    flag = f"--sglang-speculative-algorithm {algorithm}"
    if algorithm != "NGRAM":
        # SGLang 0.5.23 has no kernels there that verify drafts by sampling: eagle_utils._verify_uses_greedy
        yield (
            f"{flag}: without a GPU, SGLang replaces samples by the most probable token, so the run would not train on "
            "samples of the policy. Use NGRAM, whose drafts are verified by sampling, or drop it here."
        )
        return
    width = args.rollout_num_gpus_per_engine
    parts = {
        "--use-rollout-routing-replay": args.use_rollout_routing_replay,
        f"--rollout-num-gpus-per-engine {width}": width > 1,
        "a LoRA adapter in the engines": serves_adapter(args),
        f"the attention of --hf-checkpoint {args.hf_checkpoint}": _has_other_attention(args.hf_checkpoint),
    }
    for part, is_given in parts.items():
        if is_given:
            yield f"{flag} on a CPU is not supported with {part}: drop one of them."


def _has_other_attention(hf_checkpoint: str) -> bool:
    try:
        shape = read_shape(hf_checkpoint)
    except ConfigError:  # reported elsewhere
        return False
    return any(part is not None for part in (shape.mla, shape.sparse, shape.delta_net, shape.vision))
