"""A model with experts that begins as a dense one: sparse upcycling, arXiv:2212.05055; fine-grained, arXiv:2410.07524.

Every layer's MLP is cut along its inner width into ``slices`` pieces, ``copies`` times. Expert ``r * slices + i`` is
piece i of copy r. The router has one random row per copy, shared by the pieces of that copy, so that a token chooses
whole copies. With W the softmax over the chosen experts, which sums to 1, and D the dense MLP = sum of its pieces P_i:

    sum_r sum_i W_r (slices * P_i) = slices * sum_r W_r D = D        because sum_r slices * W_r = 1

hence the factor ``slices`` on the output projection: the new model's logits are the dense model's. Works on Hugging
Face names, so engines and trainer read the result alike. Called by ``tools/upcycle_hf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.protocols import NamedTensor
from slime.utils.errors import ConfigError

_MLP = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.(?P<kind>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Upcycling:
    """From qwen3 to qwen3_moe, which differ in their MLPs only.

    Attributes:
        copies: of the dense MLP.
        slices: pieces of each copy. Experts are that much narrower.
        topk: experts per token, whole copies.
        seed: of the routers' random rows.

    Raises:
        ConfigError: experts per token that are not whole copies, or more than there are.
    """

    copies: int
    slices: int
    topk: int
    seed: int = 1234

    def __post_init__(self) -> None:
        if min(self.copies, self.slices, self.topk) < 1:
            raise ConfigError(f"--copies {self.copies}, --slices {self.slices}, --topk {self.topk} must be at least 1.")
        if self.topk % self.slices or self.topk > self.num_experts:
            raise ConfigError(
                f"--topk {self.topk} must be a multiple of --slices {self.slices}, at most the {self.num_experts} "
                "experts: a token takes whole copies, or the model would not begin as the dense one."
            )

    @property
    def num_experts(self) -> int:
        return self.copies * self.slices

    def config(self, dense: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the new model.

        Raises:
            ConfigError: another family, or an inner width that cannot be cut.
        """
        width = int(dense.get("intermediate_size", 0))
        if dense.get("model_type") != "qwen3":
            raise ConfigError(f"--input has model_type {dense.get('model_type')!r}; only qwen3 can be upcycled.")
        if not width or width % self.slices:
            raise ConfigError(f"--slices {self.slices} must divide the intermediate_size {width} of --input.")
        return {
            **dense,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.topk,
            "moe_intermediate_size": width // self.slices,
            "norm_topk_prob": True,  # the chosen experts' weights sum to 1
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        }

    def weights(self, dense: Iterable[NamedTensor], *, std: float) -> Iterator[NamedTensor]:
        """The new model's tensors. Those that do not belong to an MLP do not change.

        Args:
            std: of the routers' rows.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for name, tensor in dense:
            match = _MLP.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            kind, mlp = match["kind"], match["mlp"]
            pieces = tensor.chunk(self.slices, dim=1 if kind == "down" else 0)
            for expert in range(self.num_experts):
                piece = pieces[expert % self.slices]  # expert r * slices + i is piece i of copy r
                whole = piece * self.slices if kind == "down" else piece
                # safetensors refuses tensors that share memory.
                yield f"{mlp}.experts.{expert}.{kind}_proj.weight", whole.clone()
            if kind == "gate":
                rows = torch.randn(self.copies, tensor.shape[1], generator=generator) * std
                # All pieces of a copy have one row: a token chooses whole copies.
                yield f"{mlp}.gate.weight", rows.repeat_interleave(self.slices, 0).to(tensor.dtype)
