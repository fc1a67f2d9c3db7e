"""Functions that a rank runs in the tests of model families on parallel layouts: load, compute, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends import Recipients
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import packed_logits, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB


def _start(layout: dict[str, int]) -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    from slime.backends.megatron_utils.patches import install

    install()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mpu.initialize_model_parallel(**layout, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _load(path: Path) -> tuple[Any, Any]:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    model, shape = build_family_model(path), shape_of(path)
    load_weights(model, shape, str(path), "--hf-checkpoint")
    return model, shape


def round_trip(
    rank: int, world_size: int, paths: list[str], layout: dict[str, int], buckets: list[int], lengths: list[int]
) -> dict[str, dict[str, Any]]:
    """Results per checkpoint.

    Returns:
        exports: for every bucket size which names come back and whether each is equal to the saved one.
        logits: of sequences of ``lengths``, whole. None if the last pipeline stage is elsewhere.
    """
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

    _start(layout)
    results = {}
    for path in map(Path, paths):
        model, shape = _load(path)
        saved = saved_tensors(path)
        exports = []
        for bucket_bytes in buckets:
            exported = [
                (name, torch.equal(value, saved[name]))
                for name, value in export_weights(model, shape, bucket_bytes, layout_of=str(path))
            ]
            exports.append(exported)
        results[path.name] = {"exports": exports, "logits": _logits(model, lengths)}
    return results


def _logits(model: Any, lengths: list[int]) -> torch.Tensor | None:
    from megatron.core import parallel_state as mpu

    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    group = mpu.get_pipeline_model_parallel_group()
    width = sum(lengths) // (mpu.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1)
    hidden = torch.empty(width, 1, model.config.hidden_size)
    if not mpu.is_pipeline_first_stage():
        dist.recv(hidden, group_src=group.rank() - 1, group=group)
        model.set_input_tensor(hidden)
    out = packed_logits(model, sequences, is_last=mpu.is_pipeline_last_stage())
    if not mpu.is_pipeline_last_stage():
        dist.send(out.contiguous(), group_dst=group.rank() + 1, group=group)
        return None
    tensor_group = mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(out) for _ in range(tensor_group.size())]
    dist.all_gather(parts, out.contiguous(), group=tensor_group)
    return torch.cat(parts, dim=-1)[..., :VOCAB]


def load_error(rank: int, world_size: int, path: str, layout: dict[str, int]) -> str:
    """The message with which loading ``path`` fails on this rank."""
    _start(layout)
    try:
        _load(Path(path))
    except ConfigError as error:
        return str(error)
    return ""


def exports_to(
    rank: int,
    world_size: int,
    paths: list[str],
    layout: dict[str, int],
    recipients: list[Recipients],
    buckets: list[int],
) -> list[tuple[list[tuple[str, bool, int]], int]]:
    """Per checkpoint, recipients and bucket size: (name, equal to the saved one, bytes) and the bytes received."""
    from slime.backends.megatron_utils.checkpoint import gather
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

    _start(layout)
    received = [0]

    class Counting(gather.Peers):
        def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
            received[0] += flat.numel() * (self.size - 1)
            return super().all_gather(flat)

        def gather(self, flat: torch.Tensor) -> torch.Tensor | None:
            received[0] += flat.numel() * (self.size - 1) * (self.rank == 0)
            return super().gather(flat)

        def broadcast(self, flat: torch.Tensor, source: int) -> None:
            received[0] += flat.numel() * (self.rank != source)
            super().broadcast(flat, source)

        def to_first(self, flat: torch.Tensor, source: int) -> None:
            received[0] += flat.numel() * (self.rank == 0)
            super().to_first(flat, source)

        def exchange(self, flat: torch.Tensor, give: Any, take: Any) -> torch.Tensor:
            received[0] += sum(take)
            return super().exchange(flat, give, take)

    gather.Peers = Counting  # type: ignore[misc]  # this process ends with the test
    results = []
    for path in map(Path, paths):
        model, shape = _load(path)
        saved = saved_tensors(path)
        for to in recipients:
            for bucket_bytes in buckets:
                received[0] = 0
                weights = export_weights(model, shape, bucket_bytes, to)
                exported = [(name, torch.equal(value, saved[name]), value.nbytes) for name, value in weights]
                results.append((exported, received[0]))
    return results
