#!/usr/bin/env python3
"""Make a Qwen3 model with experts from a dense one. Its first logits are the dense model's. No GPU is used.

    python tools/upcycle_hf.py --input /models/Qwen3-4B --output /models/Qwen3-4B-8x --copies 8 --topk 2
    python tools/upcycle_hf.py --input /models/Qwen3-4B --output /models/Qwen3-4B-fine --copies 8 --slices 4 --topk 8

--copies N        every MLP becomes N equal experts that training lets drift apart
--slices N        each of them is cut into N narrow experts, of which a token takes all or none
--topk N          experts per token, a multiple of --slices

Give the result as --hf-checkpoint: engines and trainer both need a checkpoint with experts.

Sparse upcycling, arXiv:2212.05055; fine-grained, arXiv:2410.07524. Every layer's MLP is cut along its inner width into
``slices`` pieces, ``copies`` times. Expert ``r * slices + i`` is piece i of copy r. The router has one random row per
copy, shared by the pieces of that copy, so that a token chooses whole copies. With W the softmax over the chosen
experts, which sums to 1, and D the dense MLP = sum of its pieces P_i:

    sum_r sum_i W_r (slices * P_i) = slices * sum_r W_r D = D        because sum_r slices * W_r = 1

hence the factor ``slices`` on the output projection: the new model's logits are the dense model's.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends import NamedTensor
from slime.backends.megatron_utils.conversion import run_tool
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
        import torch

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="The dense checkpoint.")
    parser.add_argument("--output", required=True, help="The directory to write; must not exist.")
    parser.add_argument("--copies", type=int, required=True, help="Experts made of one MLP.")
    parser.add_argument("--slices", type=int, default=1, help="Pieces of each. Default: 1.")
    parser.add_argument("--topk", type=int, required=True, help="Experts per token.")
    parser.add_argument("--seed", type=int, default=1234, help="Of the routers. Default: 1234.")
    options = parser.parse_args()
    if Path(options.output).exists():
        raise ConfigError(f"--output {options.output} exists already.")
    upcycle(options)


def upcycle(options: argparse.Namespace) -> None:
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    source = Path(options.input)
    plan = Upcycling(options.copies, options.slices, options.topk, options.seed)
    try:
        dense = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--input {source} has no config.json that can be read: {error}") from None
    config = plan.config(dense)
    reader = TensorReader(source, "--input")
    names = sorted(reader.names)
    weights = ((name, reader.get(name)) for name in names)
    with tempfile.TemporaryDirectory() as directory:  # files for the writer to copy: everything but the dense weights
        for entry in source.iterdir():
            # The index lists the dense tensors. The writer makes a new one.
            if entry.is_file() and entry.suffix not in (".safetensors", ".bin") and ".index." not in entry.name:
                shutil.copy(entry, directory)
        (Path(directory) / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        # Only routers are new weights: they are drawn as the dense model's were.
        std = float(dense.get("initializer_range", 0.02))
        write_hf_directory(plan.weights(weights, std=std), directory, options.output)
    print(f"{len(names)} tensors, {plan.num_experts} experts per layer -> {options.output}")


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
