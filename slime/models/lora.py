"""Low-rank adapters (LoRA, arXiv:2106.09685): settings, the linear layers that have one, and peft's names and files.

A layer with the weight ``W`` [out, in] computes ``W x + scale B (A x)`` with ``A`` [rank, in] and ``B`` [out, rank].
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slime.models.family import Rule
from slime.models.shape import MlaShape, ModelShape, MoeShape
from slime.utils.errors import ConfigError

ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."
"""Before the name of every tensor in ``WEIGHTS_FILE``."""

Matrix = Literal["A", "B"]

# The indexer of sparse attention has no gradient, and the router's choices must stay those of the base.
_LINEAR = re.compile(r"decoder\.layers\.\{layer\}\.(?!.*indexer).*\.(linear_\w+|in_proj|out_proj)\.weight")


def tensor_name(name: str, matrix: Matrix) -> str:
    """``model.layers.0.self_attn.q_proj.weight`` -> ``model.layers.0.self_attn.q_proj.lora_A.weight``."""
    return f"{name.removesuffix('.weight')}.lora_{matrix}.weight"


@dataclass(frozen=True)
class Linear:
    """A linear layer of the decoder under its Hugging Face name.

    Attributes:
        rule: the Megatron tensor that contains it, as number ``part`` of ``rule.hf``.
        rows, columns: ``out`` and ``in`` of its weight.
        layers: numbers of the decoder layers that have it.
        copies: of it in one layer: 1, or the number of experts.
    """

    rule: Rule
    part: int
    rows: int
    columns: int
    layers: tuple[int, ...]
    copies: int = 1

    @property
    def path(self) -> str:
        """Its name inside a layer, such as ``self_attn.q_proj``."""
        return self.rule.hf[self.part].rpartition("layers.{layer}.")[2].removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """The last part of its name, such as ``q_proj``."""
        return self.path.rpartition(".")[2]

    def is_target(self, name: str) -> bool:
        """As peft compares names: with the end of the path."""
        return f".{self.path}".endswith(f".{name}")

    def num_parameters(self, rank: int) -> int:
        """Numbers in the adapters of all layers."""
        return rank * (self.rows + self.columns) * len(self.layers) * self.copies


@dataclass(frozen=True)
class LoraConfig:
    """Settings of the adapters.

    Attributes:
        target_modules: names as in peft, or ``all-linear`` alone.
        adapter_path: directory of a peft adapter that training starts from.
        experts: routed experts that ``target_modules`` match have adapters, too.
        merge: engines get merged weights instead of adapters.
    """

    rank: int
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    adapter_path: str | None = None
    experts: bool = False
    rslora: bool = False
    merge: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LoraConfig | None:
        """The settings in the values of the resolved command line. None without ``--lora-rank``."""
        if not given.get("lora_rank"):  # programs of users lack the flags
            return None
        return cls(
            rank=given["lora_rank"],
            alpha=given["lora_alpha"],
            dropout=given["lora_dropout"],
            target_modules=tuple(given["lora_target_modules"] or (ALL_LINEAR,)),
            adapter_path=given["lora_adapter_path"],
            experts=given["lora_experts"],
            rslora=given["lora_use_rslora"],
            merge=given["lora_merge"],
        )

    @property
    def scale(self) -> float:
        """Factor of ``B A``: rsLoRA (arXiv:2312.03732) divides by the root of the rank."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def targets(self, shape: ModelShape) -> tuple[Linear, ...]:
        """The linear layers that have an adapter.

        ``all-linear`` means those of attention in a model with experts, plus its MLPs with ``experts``.

        Raises:
            ConfigError: a name matches no linear layer of the model, or the rank is larger than a dimension.
        """
        known = [linear for linear in linears(shape) if self.experts or not linear.rule.is_expert]
        if self.target_modules == (ALL_LINEAR,):
            has_mlps = shape.moe is None or self.experts
            found = [linear for linear in known if has_mlps or ".mlp." not in linear.rule.megatron]
        else:
            found = [linear for linear in known if any(map(linear.is_target, self.target_modules))]
        problems = [] if self.target_modules == (ALL_LINEAR,) else self._unmatched(shape, known)
        problems += [
            f"--lora-rank {self.rank} is larger than a dimension of {linear.path} [{linear.rows}, {linear.columns}]: "
            f"an adapter has at most rank {min(linear.rows, linear.columns)} there. Lower the rank, or leave the layer "
            "out of --lora-target-modules."
            for linear in found
            if self.rank > min(linear.rows, linear.columns)
        ]
        if problems:
            raise ConfigError(problems)
        return tuple(found)

    def _unmatched(self, shape: ModelShape, known: list[Linear]) -> list[str]:
        names = sorted({linear.leaf for linear in known})
        of_experts = [linear for linear in linears(shape) if linear.rule.is_expert and not self.experts]
        return [
            f"--lora-target-modules {name} matches no linear layer of model_type {shape.model_type}. "
            + (
                "It names routed experts: add --lora-experts."
                if any(linear.is_target(name) for linear in of_experts)
                else f"Names are {', '.join(names)}, or {ALL_LINEAR} alone."
            )
            for name in self.target_modules
            if not any(linear.is_target(name) for linear in known)
        ]

    def module_names(self, shape: ModelShape) -> list[str]:
        """The targets as the list ``target_modules`` of peft: leaves, sorted. Raises as :meth:`targets`."""
        return sorted({linear.leaf for linear in self.targets(shape)})

    def num_parameters(self, shape: ModelShape) -> int:
        """Trainable parameters."""
        return sum(linear.num_parameters(self.rank) for linear in self.targets(shape))

    def numbers_on_rank(
        self, shape: ModelShape, layers: Collection[int], *, tensor_ranks: int, expert_ranks: int
    ) -> tuple[float, float]:
        """Numbers in the adapters of ``layers`` on one rank: (those of all other layers, those of routed experts)."""
        others = experts = 0.0
        for linear in self.targets(shape):
            count = self.rank * len([layer for layer in linear.layers if layer in layers])
            if linear.rule.is_expert:
                experts += count * linear.copies * (linear.rows + linear.columns) / expert_ranks
                continue
            # Tensor ranks divide B of a column layer and A of a row layer.
            rows, columns = (tensor_ranks if linear.rule.split == split else 1 for split in ("column", "row"))
            others += count * (linear.rows / rows + linear.columns / columns)
        return others, experts

    def with_adapters(self, shape: ModelShape) -> ModelShape:
        """``shape`` with rules for the adapters in its family's table. Raises as :meth:`targets`.

        The adapter of a Megatron tensor has two tensors. ``lora_A`` has the ``A`` of all targets in it one below the
        other. ``lora_B`` is assembled like the tensor, with ``rank`` columns. Rows that belong to no target are zeros.
        """
        by_rule: dict[Rule, list[int]] = {}
        for linear in self.targets(shape):
            by_rule.setdefault(linear.rule, []).append(linear.part)
        added = [one for rule, parts in by_rule.items() for one in _adapter_rules(rule, parts)]
        return replace(shape, family=replace(shape.family, rules=(*shape.family.rules, *added)))

    def peft_config(self, shape: ModelShape, base: str) -> dict[str, Any]:
        """The content of ``adapter_config.json``. ``base``: name or directory of the base model."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": self.module_names(shape),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }


def _adapter_rules(rule: Rule, parts: list[int]) -> tuple[Rule, Rule]:
    name = rule.megatron.removesuffix("weight") + "adapter.lora_"
    inputs = tuple(tensor_name(rule.hf[part], "A") for part in parts)
    outputs = tuple(tensor_name(hf, "B") if part in parts else "" for part, hf in enumerate(rule.hf))
    # Tensor-parallel ranks divide the output of a layer, and thus B, or its input, and thus A.
    split = rule.split
    return (
        Rule(f"{name}A", inputs, "gate_up" if len(parts) > 1 else "copy", "row" if split == "row" else "none"),
        replace(rule, megatron=f"{name}B", hf=outputs, split="column" if split == "column" else "none", stacked=None),
    )


def adapted_layers(shape: ModelShape, config: LoraConfig) -> Iterator[tuple[str, Linear]]:
    """The name of every weight that has an adapter."""
    for linear in config.targets(shape):
        for layer in linear.layers:
            for expert in range(linear.copies):
                yield linear.rule.hf[linear.part].format(layer=layer, expert=expert), linear


def adapter_tensors(shape: ModelShape, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Names, without ``FILE_PREFIX``, and shapes of all tensors of the adapters."""
    found: dict[str, tuple[int, int]] = {}
    for name, linear in adapted_layers(shape, config):
        found[tensor_name(name, "A")] = (config.rank, linear.columns)
        found[tensor_name(name, "B")] = (linear.rows, config.rank)
    return found


def rows_of(shape: ModelShape, rule: Rule) -> list[int]:
    """Rows of each Hugging Face weight in the tensor of ``rule``."""
    return [linear.rows for linear in linears(shape) if linear.rule == rule]


def linears(shape: ModelShape) -> Iterator[Linear]:
    """Every linear layer of the decoder, without router and indexer, in the order of the family's table."""
    for rule in shape.family.rules:
        if not _LINEAR.fullmatch(rule.megatron):
            continue
        layers = tuple(layer for layer in range(shape.num_layers) if _has(shape, layer, rule))
        copies = shape.moe.num_experts if rule.is_expert and shape.moe is not None else 1
        sizes = _sizes(shape, rule) if layers else ()
        yield from (Linear(rule, part, *size, layers, copies) for part, size in enumerate(sizes))


def _has(shape: ModelShape, layer: int, rule: Rule) -> bool:
    """Whether a decoder layer has the tensor of ``rule``."""
    if ".mlp." in rule.megatron:
        if ".shared_experts." in rule.megatron:
            return shape.has_experts(layer) and shape.moe is not None and bool(shape.moe.shared_size)
        return shape.has_experts(layer) == rule.is_expert
    return shape.is_delta_net(layer) == (".linear_" not in rule.megatron)


def _sizes(shape: ModelShape, rule: Rule) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each Hugging Face weight of ``rule``. Empty if the model lacks it."""
    hidden = shape.hidden_size
    module = rule.megatron.split(".")[-2]
    if ".mlp." in rule.megatron:
        width = _mlp_width(shape, shape.moe, rule)
        return ((hidden, width),) if module == "linear_fc2" else ((2 * width // len(rule.hf), hidden),) * len(rule.hf)
    if module in ("in_proj", "out_proj"):
        return _delta_sizes(shape, rule)
    value_dim = shape.head_dim if shape.mla is None else shape.mla.v_head_dim
    if module == "linear_proj":
        return ((hidden, shape.num_attention_heads * value_dim),)
    if shape.mla is not None:
        return _latent_sizes(shape, shape.mla).get(module, ())
    gates = 2 if shape.family.has_output_gate else 1  # the query projection has the gate's rows, too
    query, key = gates * shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    return ((query, hidden), (key, hidden), (key, hidden))


def _mlp_width(shape: ModelShape, moe: MoeShape | None, rule: Rule) -> int:
    if moe is not None and ".shared_experts." in rule.megatron:
        return moe.shared_size or 0
    return moe.ffn_hidden_size if moe is not None and rule.is_expert else shape.ffn_hidden_size


def _delta_sizes(shape: ModelShape, rule: Rule) -> tuple[tuple[int, int], ...]:
    delta = shape.delta_net
    assert delta is not None, "only delta nets have in_proj and out_proj"
    keys, values, heads = delta.key_width, delta.value_width, delta.num_value_heads
    if not rule.sections:
        return ((shape.hidden_size, values),)
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    return tuple(
        (sum(rows[name] for section in tensor for name in section), shape.hidden_size) for tensor in rule.sections
    )


def _latent_sizes(shape: ModelShape, mla: MlaShape) -> dict[str, tuple[tuple[int, int], ...]]:
    """By the module of Megatron. Queries are compressed or not."""
    hidden, heads, rope = shape.hidden_size, shape.num_attention_heads, mla.qk_pos_emb_head_dim
    query = heads * (mla.qk_head_dim + rope)
    sizes = {
        "linear_kv_down_proj": ((mla.kv_lora_rank + rope, hidden),),
        "linear_kv_up_proj": ((heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank),),
    }
    if mla.q_lora_rank is None:
        return {**sizes, "linear_q_proj": ((query, hidden),)}
    return {
        **sizes,
        "linear_q_down_proj": ((mla.q_lora_rank, hidden),),
        "linear_q_up_proj": ((query, mla.q_lora_rank),),
    }
