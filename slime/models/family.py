"""A model family, and the registry of all of them.

To add a family, add a file to ``slime/models/families`` that defines a :class:`Family`. The plan, the checks, the
trainer and the table in docs/model_families.md read it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.models import families as _package
from slime.models.tables import Rules

Switch = bool | str
"""True or False for all models of a family, or the boolean field of config.json that decides."""


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Attributes:
        rules: the tensor table. A rule is not used if a model lacks its Megatron tensor (a tied output layer, the dense
            MLP in a layer of experts).
        models: released models, for the docs.
        particulars: differences from Llama's architecture, for the docs.
        routing: scores of the expert router. None for a family without experts. ``sigmoid`` means DeepSeek's router:
            a bias takes part in the choice of experts, and the first layers are dense.
        expert_width: the config field with the width of an expert.
        has_shared_gate: a sigmoid gate multiplies the output of the shared expert.
        has_qk_norm: queries and keys are normalized, per head unless ``special_layers`` has joint_qk_norm.
        has_qkv_bias: query, key and value projections have a bias.
        has_output_gate: a sigmoid gate, computed with the queries, multiplies the output of full attention.
        has_zero_centered_norms: norms multiply by 1 + weight.
        is_rotary_interleaved: rope rotates adjacent columns, not halves.
        is_mla: multi-latent attention.
        is_sparse: an indexer chooses the keys that a query attends to.
        has_delta_nets: layers are gated delta nets unless the config declares full attention.
        special_layers: changes of Megatron's decoder layers. Each is a key of ``layer_specs.SPECIAL_LAYERS``, or
            ``module:function``, which is called with a layer's spec and the transformer config.
        vision_tower: ``model_type`` of the vision tower in transformers.
        spec: module of ``--spec`` whose layers are those of the family. Such a flag has no effect.
        vision_spec: the same for the model with its vision tower, which is then built.
        rope_types: ``rope_type`` values that are supported.
        defaults: values of config fields that a config.json may omit, from the family's config class.
        refuses: config fields that must be falsy, as (field, the feature it would enable).
        ignored: regular expressions of Hugging Face names that need not be read: tensors of the multi-token-prediction
            layers if those are not built. ``{num_layers}`` is the decoder's number of layers.
        untouched: regular expressions of names that are never read, because that part of the model is not built.
    """

    model_type: str
    rules: Rules
    models: str = ""
    particulars: str = ""
    routing: Literal["softmax", "sigmoid"] | None = None
    expert_width: str = "moe_intermediate_size"
    has_shared_gate: bool = False
    has_qk_norm: Switch = False
    has_qkv_bias: Switch = False
    has_output_gate: bool = False
    has_zero_centered_norms: bool = False
    is_rotary_interleaved: bool = False
    is_mla: bool = False
    is_sparse: bool = False
    has_delta_nets: bool = False
    special_layers: tuple[str, ...] = ()
    vision_tower: str | None = None
    spec: str | None = None
    vision_spec: str | None = None
    rope_types: frozenset[str] = frozenset({"default"})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    @property
    def is_moe(self) -> bool:
        return self.routing is not None

    @property
    def has_post_norms(self) -> bool:
        """Norms after attention and MLP, before the residual stream."""
        return "post_norms" in self.special_layers

    @property
    def has_joint_qk_norm(self) -> bool:
        """One norm over all query heads together, one over all key heads."""
        return "joint_qk_norm" in self.special_layers


NOT_BUILT: dict[str, str] = {
    "qwen3_vl_moe": "its checkpoints hold experts transposed, which no table describes",
}
"""Families that have launch scripts but cannot be trained, and the reason."""


@functools.cache
def families() -> Mapping[str, Family]:
    """Every :class:`Family` of the modules in ``slime.models.families``, by ``model_type``."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(_package.__path__, f"{_package.__name__}."):
        # Not at the top of this file, which the modules of the families import.
        for value in vars(importlib.import_module(module.name)).values():
            # A family that another file imports is seen twice: it must be the same object.
            if isinstance(value, Family) and found.setdefault(value.model_type, value) is not value:
                raise ValueError(f"{module.name}: model_type {value.model_type} has two families.")
    return found


def why_not_built(model_type: object) -> str | None:
    """The reason why ``model_type`` cannot be trained, as the end of a sentence. None if it can."""
    if model_type in families():
        return None
    if isinstance(model_type, str) and model_type in NOT_BUILT:
        return NOT_BUILT[model_type]
    return f"it is unknown; supported are {', '.join(sorted(families()))}"


def is_family_spec(module: str) -> bool:
    """Whether ``--spec MODULE`` names layers that a family has anyway."""
    return any(module == family.spec for family in families().values())


def is_vision_spec(module: str) -> bool:
    """Whether ``--spec MODULE`` names a model with its vision tower."""
    return any(module == family.vision_spec for family in families().values())
