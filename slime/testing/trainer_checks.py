"""The same for hooks of the trainer that can be called without one. Tensors are those of two samples, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slime.hooks.load import can_be_called
from slime.testing.checks import Call, Check

__all__ = ["SIGNATURE_ONLY", "TRAINER_CHECKS"]

_PROMPT_LENGTH = 3
_RESPONSE_LENGTHS = [2, 4]
_TOTAL_LENGTHS = [_PROMPT_LENGTH + length for length in _RESPONSE_LENGTHS]
SIGNATURE_ONLY = "its signature fits; it runs with the trainer's model only"


def _rows(value: float) -> list[torch.Tensor]:
    """One tensor ``[R_i]`` per sample."""
    return [value - 0.1 * torch.arange(length, dtype=torch.float32) for length in _RESPONSE_LENGTHS]


def _rollout_data() -> dict[str, Any]:
    """A rank's batch once its log-probs are known."""
    return {
        "tokens": [torch.arange(length) for length in _TOTAL_LENGTHS],
        "response_lengths": list(_RESPONSE_LENGTHS),
        "total_lengths": list(_TOTAL_LENGTHS),
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in _RESPONSE_LENGTHS],
        "rewards": [1.0, -1.0],
        "raw_reward": [1.0, 0.0],
        "rollout_ids": [0, 1],
        "rollout_mask_sums": list(_RESPONSE_LENGTHS),
        "truncated": [0, 0],
        "sample_indices": [0, 1],
        "log_probs": _rows(-0.5),
        "rollout_log_probs": _rows(-0.6),
        "ref_log_probs": _rows(-0.7),
        "values": _rows(0.2),
        "advantages": _rows(0.3),
        "returns": _rows(0.4),
    }


def custom_advantage(call: Call) -> Iterator[str]:
    data = _rollout_data()
    del data["advantages"], data["returns"]
    call.function(call.args, data)
    for name in ("advantages", "returns"):
        lengths = [len(row) for row in data.get(name, ())]
        if lengths != _RESPONSE_LENGTHS:
            yield f"rollout_data[{name!r}] has rows of {lengths or 'nothing'}; the responses have {_RESPONSE_LENGTHS}"


def custom_tis(call: Call) -> Iterator[str]:
    pg_loss = torch.cat(_rows(0.3)).requires_grad_()
    result = call.function(
        call.args,
        pg_loss=pg_loss,
        train_log_probs=_rows(-0.5),
        rollout_log_probs=_rows(-0.6),
        loss_masks=[torch.ones(length) for length in _RESPONSE_LENGTHS],
        total_lengths=list(_TOTAL_LENGTHS),
        response_lengths=list(_RESPONSE_LENGTHS),
    )
    if not isinstance(result, tuple) or len(result) != 3:
        yield f"it returned {type(result).__name__}; it must return (pg_loss, masks, metrics)"
        return
    corrected, masks, metrics = result
    if corrected.shape != pg_loss.shape:
        yield f"pg_loss must keep its shape {tuple(pg_loss.shape)}, it is {tuple(corrected.shape)}"
    elif not corrected.requires_grad:
        yield "pg_loss has lost its gradient"
    if [len(mask) for mask in masks] != _RESPONSE_LENGTHS:
        yield f"masks have {[len(mask) for mask in masks]} entries; the responses have {_RESPONSE_LENGTHS}"
    for name, values in metrics.items():
        if values.shape != pg_loss.shape:
            yield f"metric {name!r} must have one value per token, its shape is {tuple(values.shape)}"


def pg_loss_reducer(call: Call) -> Iterator[str]:
    masks = [torch.ones(length) for length in _RESPONSE_LENGTHS]
    for per_token in (False, True):
        reduce = call.function(list(_TOTAL_LENGTHS), list(_RESPONSE_LENGTHS), masks, per_token)
        if not callable(reduce):
            yield f"it returned {type(reduce).__name__}; it must return a function from one value per token to a scalar"
            return
        total = reduce(torch.cat(_rows(0.3)))
        if total.numel() != 1:
            yield f"its function returned shape {tuple(total.shape)}; it must return a scalar"
            return


def data_postprocess(call: Call) -> Iterator[str]:
    data = _rollout_data()
    if can_be_called(call.function, ("args", "rollout_id", "rollout_data")):
        call.function(call.args, 0, data)
    else:
        call.function(call.args, data)
    lengths = {name: len(values) for name, values in data.items() if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        yield f"the columns are not equally long afterwards: {lengths}"


TRAINER_CHECKS: dict[str, Check] = {
    "custom_advantage_function_path": custom_advantage,
    "custom_tis_function_path": custom_tis,
    "custom_pg_loss_reducer_function_path": pg_loss_reducer,
    "rollout_data_postprocess_path": data_postprocess,
}
