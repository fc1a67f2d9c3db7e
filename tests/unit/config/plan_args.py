"""Namespaces for the plan's tests, with only the arguments that the plan reads."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def plan_args(**overrides: Any) -> Namespace:
    """Two trainer ranks and two engines of a small dense model whose shape the flags give."""
    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 1000,
        "untie_embeddings_and_output_weights": True,
        "world_size": 2,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "num_gpus_per_node": 8,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "num_steps_per_rollout": 1,
        "micro_batch_size": 1,
        "rollout_max_response_len": 100,
        "num_rollout": 10,
        "hf_checkpoint": "models/tiny",
        "output_dir": "outputs",
        "experiment_name": "test",
        "use_distributed_optimizer": True,
    }
    return Namespace(**(values | overrides))
