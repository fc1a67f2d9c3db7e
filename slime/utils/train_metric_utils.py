"""Public alias: ``from slime.utils.train_metric_utils import reduce_train_step_metrics``."""

from slime.observability.train_metric_utils import (
    gather_and_reduce_log_dict,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)

__all__ = ["gather_and_reduce_log_dict", "reduce_train_step_metrics", "rollout_log_metric_contribution"]
