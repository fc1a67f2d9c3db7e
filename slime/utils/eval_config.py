"""Public alias: ``from slime.utils.eval_config import EvalDatasetConfig``."""

from __future__ import annotations

from slime.rollout.eval_config import EvalDatasetConfig, build_eval_dataset_configs

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs"]
