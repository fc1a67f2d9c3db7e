"""Functions that the ranks run in the tests of context-parallel attention."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.model.attention import PackedAttention, packed_segments
from slime.backends.training.context_parallel import ShardedSequences, gather_responses, zigzag_rows


def attend(
    rank: int, world_size: int, inputs: list[torch.Tensor], cotangent: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """This rank's rows, its output, and the gradients of its part of ``inputs`` (query, key, value ``[T, h, d]``)."""
    dist.init_process_group("gloo")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = zigzag_rows(bounds, rank, world_size)
    config = SimpleNamespace(
        window_size=None, softmax_type="vanilla", kv_channels=inputs[0].size(-1), attention_dropout=0.0
    )
    attention = PackedAttention(config, layer_number=1)
    local = [tensor[rows].requires_grad_() for tensor in inputs]
    segments = packed_segments(bounds, max(lengths), cp_rank=rank, cp_size=world_size, cp_group=dist.group.WORLD)
    out = attention(*local, packed_seq_params=segments)
    (out * cotangent[rows]).sum().backward()
    return rows, out.detach(), [tensor.grad for tensor in local]


def gather(rank: int, world_size: int, owner: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole made from parts, ``owner[i]`` holding token i, and the gradient of this rank's part of a loss that all
    ranks compute from the whole."""
    dist.init_process_group("gloo")
    index = torch.tensor([i for i, one in enumerate(owner) if one == rank], dtype=torch.int64)
    local = values[index].requires_grad_()
    part = ShardedSequences(None, index, len(owner))  # type: ignore[arg-type]  # only the index is read
    whole = gather_responses(local, part, dist.group.WORLD)
    (whole.sum() ** 2).backward()
    return whole.detach(), local.grad


def attend_with_transformers(
    rank: int,
    world_size: int,
    model: str,
    hidden: torch.Tensor,
    cotangent: torch.Tensor,
    lengths: list[int],
    sequence_parallel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows, its output, the gradient of its rows, and that of the query projection, all ranks together.

    Args:
        sequence_parallel: the ranks are tensor-parallel instead of context-parallel.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    from slime_plugins.models.hf_attention import HuggingfaceAttention

    class Attention(HuggingfaceAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            torch.manual_seed(self.hf_layer_idx)
            self.hf_config._attn_implementation = "sdpa"
            self.self_attn = Qwen3Attention(self.hf_config, self.hf_layer_idx).double()
            self.rope = Qwen3RotaryEmbedding(self.hf_config)

        def hf_forward(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
            assert packed_seq_params.cu_seqlens_q.tolist() == [0, hidden_states.size(1)]
            rope = self.rope(hidden_states, torch.arange(hidden_states.size(1))[None])
            return self.self_attn(hidden_states, position_embeddings=rope, attention_mask=None)[0]

    dist.init_process_group("gloo")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    cp_rank, cp_size = (0, 1) if sequence_parallel else (rank, world_size)
    rows = zigzag_rows(bounds, cp_rank, cp_size) if cp_size > 1 else torch.arange(sum(lengths))
    if sequence_parallel:
        rows = rows.chunk(world_size)[rank]
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    groups = SimpleNamespace(tp=dist.group.WORLD if sequence_parallel else None)
    attention = Attention(Namespace(hf_checkpoint=model), config, 2, pg_collection=groups)
    local = hidden[rows, None].requires_grad_()
    segments = packed_segments(bounds, max(lengths), cp_rank=cp_rank, cp_size=cp_size, cp_group=dist.group.WORLD)
    out, bias = attention(local, attention_mask=None, packed_seq_params=segments)
    assert bias is None
    (out[:, 0] * cotangent[rows]).sum().backward()
    gradient = attention.self_attn.q_proj.weight.grad
    dist.all_reduce(gradient)
    return rows, out[:, 0].detach(), local.grad[:, 0], gradient


def attend_to_latents(
    rank: int, world_size: int, hf: str, layout: dict[str, int], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Latent attention in fp64 of the first layer of ``hf``, on random hidden states.

    Returns:
        this rank's rows, its output and the gradient of its rows, gradients of the weights summed over context-parallel
        ranks, and the bytes that the rank sends in each gather among them.
    """
    from pathlib import Path

    from megatron.core import parallel_state as mpu

    from slime.backends.training import context_parallel as kernel
    from tests.dist.family_cases import _load, _start

    _start(layout)
    model = _load(Path(hf))[0]
    attention, config = model.decoder.layers[0].self_attention.double(), model.config
    cp_rank, cp_size, cp_group = (
        mpu.get_context_parallel_rank(),
        layout["context_parallel_size"],
        mpu.get_context_parallel_group(),
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = zigzag_rows(bounds, cp_rank, cp_size) if cp_size > 1 else torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[rows]
    generator = torch.Generator().manual_seed(1)
    hidden, cotangent = torch.randn(2, sum(lengths), 1, config.hidden_size, generator=generator, dtype=torch.float64)
    segments = packed_segments(bounds, max(lengths), cp_rank=cp_rank, cp_size=cp_size, cp_group=cp_group)
    segments.prepare(positions[None], config)
    tensor_rank, slices = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    mine = rows.chunk(slices)[tensor_rank]
    sent: list[int] = []
    stock = dist.all_gather_into_tensor

    def gather(out: torch.Tensor, x: torch.Tensor, group: Any = None, **more: Any) -> Any:
        if group is cp_group:
            sent.append(x.numel() * x.element_size())
        return stock(out, x, group=group, **more)

    local = hidden[mine].requires_grad_()
    kernel.dist.all_gather_into_tensor = gather
    try:
        out, _ = attention(local, attention_mask=None, packed_seq_params=segments)
    finally:
        kernel.dist.all_gather_into_tensor = stock
    (out * cotangent[mine]).sum().backward()
    gradients = {name: weight.grad for name, weight in attention.named_parameters()}
    if cp_size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=cp_group)
    return mine, out.detach(), local.grad, gradients, sent
