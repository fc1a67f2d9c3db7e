"""Public alias of prompt files and datasets; they live in ``slime.data.prompts``."""

from __future__ import annotations

from slime.batch.balance import count_micro_batches as get_minimum_num_micro_batch_size
from slime.data.prompts import Dataset, filter_long_prompt, read_file
from slime.data.prompts import parse_path as _parse_generalized_path
from slime.ray.shards import process_rollout_data

__all__ = [
    "Dataset",
    "_parse_generalized_path",
    "filter_long_prompt",
    "get_minimum_num_micro_batch_size",
    "process_rollout_data",
    "read_file",
]
