"""Defects of megatron-core 0.16.1 that bite on any device when TransformerEngine and Apex are absent, repaired.

Applied by :func:`slime.backends.megatron_utils.patches.install.install`, never at import. Every function says what goes
wrong, why, and when to delete it; ``tests/unit/megatron_utils`` shows the effect of those that fail silently.
"""

from __future__ import annotations

import importlib.util
import queue
from typing import Any

import torch

__all__ = [
    "repair_distributed_optimizer_checkpoints",
    "repair_mixed_precision_optimizers",
    "repair_reduce",
    "repair_save_writers",
]


def repair_reduce() -> None:
    """``tensor_parallel.mappings._reduce`` drops its result for a non-contiguous input.

    Why: it reduces ``x.contiguous()``, a copy then, and returns ``x``. Silent: gradients stay unreduced.
    Upstream: present in Megatron-LM main at core_v0.16.1. Delete when ``_reduce`` returns the reduced tensor.
    """
    from megatron.core.tensor_parallel import mappings

    def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() == 1:
            return x
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        return x

    mappings._reduce = _reduce


def repair_save_writers() -> None:
    """Saving a checkpoint forks writer processes and starts a server that re-imports ``__main__``.

    Why: ``filesystem_async`` is made for asynchronous saves. Its results travel through a spawn-context ``Manager``,
    which runs an unguarded main script again and outlives a killed trainer; its writers are forked from a process with
    running threads (gloo, Ray), which may deadlock, and are waited for without a deadline. A synchronous save needs
    neither: the buckets are written here, one after the other.
    Upstream: core_v0.16.1. Delete when a synchronous save writes in its own process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def write(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: queue.Queue[Any]) -> None:
        written: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            done: queue.Queue[Any] = queue.Queue()
            pending: queue.Queue[int] = queue.Queue()
            pending.put(index)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, done, pending, use_fsync=True, use_msc=use_msc
            )
            _, written[index] = done.get_nowait()
            if isinstance(written[index], Exception):
                results.put(written[index])
                return
        results.put(written)

    filesystem_async._results_queue = queue.Queue()
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)


def repair_mixed_precision_optimizers() -> None:
    """Optimizers mix up the states of a model whose parameters have several dtypes.

    Why: both keep fp32 parameters apart from 16-bit ones, and count a parameter's place in another order than the inner
    optimizer has it. ``DistributedOptimizer`` counts in the order of the gradient buffers, but hands over the fp32
    parameters of a group first; ``Float16OptimizerWithFloat16Params`` counts 16-bit ones only. A checkpoint then holds
    the states of other parameters where their sizes happen to be equal, and cannot be written where they are not.
    Upstream: core_v0.16.1. Delete when a model with parameters of two dtypes is resumed bit for bit without this.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as WholeOptimizer

    stock_ranges = DistributedOptimizer._build_optimizer_group_ranges
    stock_init, stock_sharded = WholeOptimizer.__init__, WholeOptimizer.sharded_state_dict

    def build_ranges(cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
        _, group_ranges = stock_ranges(param_groups, gbuf_ranges)
        places = {}
        for index, group in enumerate(group_ranges):
            group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            places.update({parameter: (index, place) for place, parameter in enumerate(group["params"])})
        return places, group_ranges

    def __init__(self: Any, *args: Any, **kw: Any) -> None:
        stock_init(self, *args, **kw)
        if not self.is_stub_optimizer:
            for group, wide in zip(self.optimizer.param_groups, self.fp32_from_fp32_groups, strict=True):
                apart = {id(parameter) for parameter in wide}
                group["params"] = [main for main in group["params"] if id(main) not in apart] + wide

    def sharded_state_dict(self: Any, *args: Any, **kw: Any) -> Any:
        if self.is_stub_optimizer:
            return stock_sharded(self, *args, **kw)
        groups = self.float16_groups
        self.float16_groups = [[*a, *b] for a, b in zip(groups, self.fp32_from_fp32_groups, strict=True)]
        try:
            return stock_sharded(self, *args, **kw)
        finally:
            self.float16_groups = groups

    DistributedOptimizer._build_optimizer_group_ranges = classmethod(build_ranges)
    WholeOptimizer.__init__, WholeOptimizer.sharded_state_dict = __init__, sharded_state_dict


def repair_distributed_optimizer_checkpoints() -> None:
    """``DistributedOptimizer`` cannot save and load torch's Adam, which it falls back to without TE and Apex.

    Three faults, all around Adam's per-parameter ``step`` tensor, which TE's and Apex' Adam do not have:

    1. ``load_state_dict`` installs *one shared* ``step`` tensor; Adam advances it in place once per parameter, so bias
       correction is silently wrong after a resume.
    2. ``sharded_state_dict`` asserts exactly one step value, but an Adam that has not stepped has none.
    3. The parameter-state accessors copy ``step`` as if it were sharded like the parameter (KeyError), and write into a
       leaf that requires grad (RuntimeError in fp32).

    Upstream: core_v0.16.1. Delete when a resumed run with torch's Adam equals the uninterrupted one without this.
    """
    if importlib.util.find_spec("transformer_engine") is not None or importlib.util.find_spec("apex") is not None:
        return
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if getattr(DistributedOptimizer, "_slime_repaired", False):
        return
    stock_get = DistributedOptimizer._get_main_param_and_optimizer_states
    stock_load = DistributedOptimizer.load_state_dict
    stock_sharded = DistributedOptimizer.sharded_state_dict

    def _get(self: Any, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: state for name, state in stock_get(self, model_param).items() if name != "step"}

    @torch.no_grad()
    def _set(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][index]
        for name, target in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        stock_load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def sharded_state_dict(self: Any, model_state: Any = None, is_loading: bool = False, *args: Any, **kw: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = self.optimizer.state[param]
                    if not state:
                        zeros = torch.zeros_like
                        state.update(step=torch.tensor(0.0), exp_avg=zeros(param), exp_avg_sq=zeros(param))
        return stock_sharded(self, model_state or {}, is_loading, *args, **kw)

    DistributedOptimizer._get_main_param_and_optimizer_states = _get
    DistributedOptimizer._set_main_param_and_optimizer_states = _set
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer._slime_repaired = True
