"""Base class of a user's attention layer from transformers, which replaces Megatron's.

    class Attention(HuggingfaceAttention):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.self_attn = MyAttention(self.hf_config, self.hf_layer_idx)

        def hf_forward(self, hidden_states, packed_seq_params):
            return self.self_attn(hidden_states)

    ModuleSpec(module=Attention, params={"args": args})

Every rank holds all weights of the layer and computes whole sequences. Tensor-parallel ranks do not divide the work.
Context-parallel ranks compute the same sequences and keep their rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch.distributed.nn.functional import all_reduce
from transformers import AutoConfig

from slime.backends.megatron_utils.model.attention import PackedSegments
from slime.backends.training.context_parallel import zigzag_rows

__all__ = ["HuggingfaceAttention"]


class HuggingfaceAttention(MegatronModule, ABC):
    """Called by Megatron's ``TransformerLayer`` as its self-attention, with packed sequences only.

    Attributes:
        args: the arguments of the run.
        hf_config: the model's configuration of transformers, of its language model.
        hf_layer_idx: number of the layer, counted from 0.
    """

    def __init__(
        self,
        args: Namespace,
        config: Any,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.args = args
        self.layer_number, self.hf_layer_idx = layer_number, layer_number - 1
        self.hf_config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True).get_text_config()
        self.tp_group = None if pg_collection is None else pg_collection.tp

    @abstractmethod
    def hf_forward(self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams) -> torch.Tensor:
        """``[1, L, h]``, one whole sequence with its padding at the end, -> the same.

        Args:
            packed_seq_params: ``cu_seqlens_q`` and ``cu_seqlens_kv`` are ``[0, L]``.
        """

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackedSegments, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """``[t, 1, h]``, this rank's rows, -> the same, and no bias."""
        is_shared = self.config.sequence_parallel
        if is_shared:
            # Each rank has the gradient of its rows only. Megatron sums the gradients of marked parameters.
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        whole, rows = self._whole(hidden_states, packed_seq_params)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        out = torch.cat([self._sequence(whole[first:end]) for first, end in pairwise(bounds)])
        out = out if rows is None else out[rows]
        return (self._own_rows(out) if is_shared else out), None

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        # Not Megatron's scatter: its backward would give every rank the gradients of all rows.
        group = get_tensor_model_parallel_group_if_none(self.tp_group)
        own: torch.Tensor = whole.chunk(group.size())[group.rank()]
        return own

    def _sequence(self, rows: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([0, len(rows)], dtype=torch.int32, device=rows.device)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=len(rows),
            max_seqlen_kv=len(rows),
        )
        return self.hf_forward(rows.transpose(0, 1), params).transpose(0, 1)

    @staticmethod
    def _whole(local: torch.Tensor, segments: PackedSegments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of all context-parallel ranks, and the indices of this rank's rows. None means all."""
        if segments.cp_size == 1:
            return local, None
        rows = zigzag_rows(segments.cu_seqlens_q, segments.cp_rank, segments.cp_size)
        padded = local.new_zeros((segments.cp_size * len(local), *local.shape[1:])).index_copy(0, rows, local)
        # Each row has one owner, so the sum only copies. Backward sums the gradients of all ranks.
        return all_reduce(padded, group=segments.cp_group), rows
