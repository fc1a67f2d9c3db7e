"""The shape of a model, read from the ``config.json`` of its Hugging Face directory.

This is the only reader of the fields that describe an architecture. Names, defaults and exceptions of a family are data
of its :class:`~slime.models.family.Family`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from slime.models.config_json import ConfigReader, load_model_config
from slime.models.family import MOST_LAYERS, Family, Rule, families, why_not_built
from slime.models.shape import (
    DeltaNetShape,
    Llama3Rope,
    MlaShape,
    ModelShape,
    MoeShape,
    SparseShape,
    VisionShape,
    YarnRope,
)
from slime.utils.errors import ConfigError


def read_shape(hf_checkpoint: str, *, with_vision: bool = False) -> ModelShape:
    """The shape of the model in the directory ``hf_checkpoint``.

    Args:
        with_vision: include the vision tower. Otherwise only the language model of a vision-language model is read.

    Raises:
        ConfigError: the architecture or one of its options is not supported, or a field is missing or not a number.
    """
    return shape_from_config(load_model_config(hf_checkpoint), hf_checkpoint, with_vision=with_vision)


def shape_from_config(config: Mapping[str, Any], hf_checkpoint: str, *, with_vision: bool = False) -> ModelShape:
    """The shape that ``config`` describes. Messages name ``hf_checkpoint``. Raises as :func:`read_shape`."""
    where = f"--hf-checkpoint {hf_checkpoint}: config.json"
    model_type = config.get("model_type")
    missing = why_not_built(model_type)
    if missing is not None or not isinstance(model_type, str):
        raise ConfigError(f"{where} has model_type {model_type!r}, which cannot be trained: {missing}.")
    reader = ConfigReader(_text_model(config), families()[model_type])
    shape = _read(reader)
    if with_vision:
        shape = replace(shape, vision=_vision(config, reader))
    if not reader.problems and not reader.missing:
        reader.problems += _contradictions(config, shape)
    problems = [f"{where} {text}" for text in (*_refused(reader), *reader.problems)]
    if reader.missing:
        problems.append(f"{where} lacks {', '.join(reader.missing)}.")
    if problems:
        raise ConfigError(problems)
    return shape


def sizes_from_config(
    config: Mapping[str, Any], family: Family, *, with_vision: bool = False
) -> tuple[ModelShape, list[str], list[str]]:
    """The shape of any model that is like ``family``, its problems, and the fields that are missing.

    For the plan, which shows sizes of models that cannot be trained, too. A wrong or missing field has the value 1.
    """
    reader = ConfigReader(_text_model(config), family)
    shape = _read(reader)
    if with_vision:
        # Problems of the tower are dropped: its number of parameters does not depend on the fields that are checked.
        shape = replace(shape, vision=_vision(config, ConfigReader(reader.config, family)))
    return shape, reader.problems, reader.missing


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    # Multimodal models may declare tied embeddings outside of that part.
    return {**inner, "tie_word_embeddings": inner.get("tie_word_embeddings") or config.get("tie_word_embeddings")}


def _read(reader: ConfigReader) -> ModelShape:
    family = reader.family
    heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    mla = _mla(reader) if family.is_mla else None
    if mla is not None:
        head_dim, groups = mla.qk_head_dim, heads
    else:
        if reader.config.get("head_dim") is None and hidden_size % heads:
            reader.problems.append(f"has hidden_size {hidden_size}, which num_attention_heads {heads} must divide.")
        head_dim = reader.integer("head_dim", default=max(1, hidden_size // heads))
        groups = reader.integer("num_key_value_heads", default=heads)
    num_layers = reader.integer("num_hidden_layers", most=MOST_LAYERS)
    max_positions = reader.integer("max_position_embeddings", default=4096)
    return ModelShape(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        # Models without dense layers may lack the first.
        ffn_hidden_size=reader.integer("intermediate_size", "moe_intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        norm_epsilon=reader.number("rms_norm_eps"),
        rotary_base=reader.rope_number("rope_theta", default=reader.number("rope_theta", default=10000.0)),
        # Latent attention rotates separate columns.
        rotary_percent=1.0 if mla is not None else _rotary_percent(reader, head_dim),
        is_tied=reader.flag("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        llama3_rope=_llama3_rope(reader) if reader.rope_type == "llama3" else None,
        yarn_rope=_yarn_rope(reader, max_positions) if reader.rope_type == "yarn" else None,
        has_qk_norm=reader.switch(family.has_qk_norm),
        has_qkv_bias=reader.switch(family.has_qkv_bias),
        has_post_norms=family.has_post_norms,
        is_rotary_interleaved=family.is_rotary_interleaved,
        moe=_moe(reader, num_layers) if family.is_moe else None,
        mla=mla,
        sparse=_sparse(reader, num_layers) if family.is_sparse else None,
        delta_net=_delta_net(reader, num_layers) if family.has_delta_nets else None,
        num_mtp_layers=reader.integer(
            "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=0, least=0, most=MOST_LAYERS
        ),
    )


def _mla(reader: ConfigReader) -> MlaShape:
    # null means "not compressed"; a missing field has the family's default.
    is_direct = "q_lora_rank" in reader.config and reader.config["q_lora_rank"] is None
    return MlaShape(
        q_lora_rank=None if is_direct else reader.integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_head_dim=reader.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )


def _sparse(reader: ConfigReader, num_layers: int) -> SparseShape:
    layers = _indexer_layers(reader.config, num_layers)
    if len(layers) != num_layers or not layers[0]:
        reader.problems.append("must declare for every layer whether it has an indexer, and the first must have one.")
    return SparseShape(
        num_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        topk=reader.integer("index_topk"),
        is_rope_interleaved=reader.flag("indexer_rope_interleave"),
        layers=layers,
    )


def _indexer_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """A list or a text such as FFSS (full, shared), else each n-th layer after the first few (GLM-5.2)."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(kinds, list | str):
        return tuple(str(kind).upper().startswith("F") for kind in kinds)
    freq, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    # Each of the first ``offset`` layers has an indexer.
    return tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers))


def _delta_net(reader: ConfigReader, num_layers: int) -> DeltaNetShape:
    kinds = reader.layer_kinds("layer_types", num_layers)
    if kinds is not None:
        layers = tuple(kind == "linear_attention" for kind in kinds)
    else:
        interval = max(1, reader.integer("full_attention_interval"))
        # The last layer of each interval has full attention.
        layers = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return DeltaNetShape(
        layers=layers,
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_head_dim=reader.integer("linear_key_head_dim"),
        value_head_dim=reader.integer("linear_value_head_dim"),
        conv_kernel_dim=reader.integer("linear_conv_kernel_dim"),
    )


def _moe(reader: ConfigReader, num_layers: int) -> MoeShape:
    family = reader.family
    width = reader.integer(family.expert_width)
    # transformers 5 writes num_local_experts for models whose released checkpoints have num_experts.
    num_experts = reader.integer("n_routed_experts", "num_experts", "num_local_experts")
    topk = reader.integer("num_experts_per_tok")
    if family.routing == "softmax":
        has_gate = family.has_shared_gate
        return MoeShape(
            num_experts=num_experts,
            layers=_sparse_step_layers(reader, num_layers),
            ffn_hidden_size=width,
            topk=topk,
            shared_size=reader.integer("shared_expert_intermediate_size", least=0) if has_gate else None,
            has_shared_gate=has_gate,
            score_function="softmax",
            pre_softmax=not reader.flag("norm_topk_prob"),
        )
    num_groups = reader.integer("n_group", default=1)
    scale = reader.number("routed_scaling_factor", default=1.0)
    num_shared = reader.integer("n_shared_experts", default=0, least=0)
    return MoeShape(
        num_experts=num_experts,
        layers=_layers_after_dense(reader, num_layers),
        ffn_hidden_size=width,
        topk=topk,
        shared_size=width * num_shared if num_shared else None,
        score_function="sigmoid",
        pre_softmax=True,
        has_expert_bias=True,
        num_groups=num_groups if num_groups > 1 else None,
        group_topk=reader.integer("topk_group", default=1) if num_groups > 1 else None,
        scaling_factor=scale,
    )


def _sparse_step_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Qwen: every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``."""
    step = max(1, reader.integer("decoder_sparse_step", default=1, least=0))  # 0 means 1
    dense = reader.items("mlp_only_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _layers_after_dense(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """DeepSeek and GLM: every ``moe_layer_freq``-th layer after the first few."""
    kinds = reader.layer_kinds("mlp_layer_types", num_layers)  # transformers 5 writes it for some of them
    if kinds is not None:
        return tuple(kind == "sparse" for kind in kinds)
    num_dense = reader.integer("first_k_dense_replace", least=0)
    step = max(1, reader.integer("moe_layer_freq", default=1, least=0))
    return tuple(layer >= num_dense and layer % step == 0 for layer in range(num_layers))


def _rotary_percent(reader: ConfigReader, head_dim: int) -> float:
    """The share of a head's columns that rope rotates."""
    if reader.rope.get("partial_rotary_factor") is not None:
        return float(reader.rope_number("partial_rotary_factor"))
    # MiniMax gives the number of columns instead.
    return reader.number("partial_rotary_factor", default=reader.integer("rotary_dim", default=head_dim) / head_dim)


def _vision(config: Mapping[str, Any], reader: ConfigReader) -> VisionShape | None:
    tower = config.get("vision_config")
    if reader.family.vision_tower is None or not isinstance(tower, Mapping):
        reader.problems.append(
            "describes no vision tower that can be trained, which images need: drop --multimodal-keys."
        )
        return None
    outside = ConfigReader(config, reader.family)  # token ids are outside of the language model's part
    sections = reader.rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3 or not reader.rope.get("mrope_interleaved", True):
        reader.problems.append("must have three mrope_section in its rope settings, and mrope_interleaved true.")
        sections = [1, 1, 1]  # to go on and collect the other problems
    shape = VisionShape(
        config=dict(tower),
        num_deep_layers=len(tower.get("deepstack_visual_indexes") or ()),
        rope_sections=(sections[0], sections[1], sections[2]),
        image_token=outside.integer("image_token_id", least=0),
        video_token=outside.integer("video_token_id", least=0),
        start_token=outside.integer("vision_start_token_id", least=0),
        merge_size=int(tower.get("spatial_merge_size", 2)),  # the default of transformers
    )
    reader.problems += outside.problems
    reader.missing += outside.missing
    return shape


def _llama3_rope(reader: ConfigReader) -> Llama3Rope:
    return Llama3Rope(
        factor=float(reader.rope_number("factor")),
        low_freq_factor=float(reader.rope_number("low_freq_factor")),
        high_freq_factor=float(reader.rope_number("high_freq_factor")),
        original_max_position_embeddings=int(reader.rope_number("original_max_position_embeddings")),
    )


def _yarn_rope(reader: ConfigReader, max_positions: int) -> YarnRope:
    # Defaults of the reference implementation. Without mscale_all_dim only the rotated columns are scaled.
    return YarnRope(
        factor=float(reader.rope_number("factor")),
        original_max_position_embeddings=int(reader.rope_number("original_max_position_embeddings", max_positions)),
        beta_fast=float(reader.rope_number("beta_fast", 32.0)),
        beta_slow=float(reader.rope_number("beta_slow", 1.0)),
        mscale=float(reader.rope_number("mscale", 1.0)),
        mscale_all_dim=float(reader.rope_number("mscale_all_dim", 0.0)),
    )


def _contradictions(config: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    """Numbers that are valid alone but not together. Megatron and engines fail on them without naming the field."""
    heads, groups, head_dim = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    if heads % groups:
        yield f"has num_attention_heads {heads} and num_key_value_heads {groups}: the first must be a multiple."
    if shape.mla is None and round(head_dim * shape.rotary_percent) % 2:
        yield f"has head_dim {head_dim}, of which rope turns {shape.rotary_percent:.4g}: that must be an even number."
    if not 0 < shape.rotary_percent <= 1:
        yield f"has partial_rotary_factor {shape.rotary_percent:.4g}; it must be above 0 and at most 1."
    for name, value in (("rms_norm_eps", shape.norm_epsilon), ("rope_theta", shape.rotary_base)):
        if not value > 0:
            yield f"has {name} {value}; it must be above 0."
    if shape.moe is not None and shape.moe.topk > shape.moe.num_experts:
        yield f"has num_experts_per_tok {shape.moe.topk}, but only {shape.moe.num_experts} experts."
    if shape.moe is not None and shape.moe.num_experts % (shape.moe.num_groups or 1):
        yield f"has {shape.moe.num_experts} experts, which n_group {shape.moe.num_groups} must divide."
    delta = shape.delta_net
    if delta is not None and delta.num_value_heads % delta.num_key_heads:
        yield (
            f"has linear_num_value_heads {delta.num_value_heads}, which must be a multiple of linear_num_key_heads "
            f"{delta.num_key_heads}."
        )
    yield from _other_architecture(config, shape.family)


def _other_architecture(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Engines build the class named by ``architectures``, the trainer the family of ``model_type``."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"has architectures {names!r}; it must be a list of names of classes."
        return
    for name in names:
        stem = name.partition("For")[0].lower().replace("_", "")  # Qwen3MoeForCausalLM -> qwen3moe
        other = next((one for one in families().values() if one.model_type.replace("_", "") == stem), None)
        if other is not None and other is not family and _decoder(other) != _decoder(family):
            yield (
                f"has model_type {config.get('model_type')!r} and architectures {names}: they name different models. "
                "Take both from the model that the weights belong to."
            )
            return


def _decoder(family: Family) -> list[Rule]:
    """The table without multi-token-prediction layers: an engine may serve the model without them."""
    return [rule for rule in family.rules if not rule.megatron.startswith("mtp.")]


def _refused(reader: ConfigReader) -> list[str]:
    """Options of the family that the trainer does not build."""
    config, family = reader.config, reader.family
    problems = [
        f"has {name} {config[name]}: {meaning} are not supported."
        for name, meaning in family.refuses
        if config.get(name)
    ]
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"has hidden_act {config['hidden_act']!r}; only silu is supported.")
    if reader.rope_type not in family.rope_types:
        problems.append(f"has rope type {reader.rope_type!r}; supported are {', '.join(sorted(family.rope_types))}.")
    if family.routing == "sigmoid":
        problems += _refused_routing(reader)
    if family.is_mla and (share := _rotary_percent(reader, head_dim=1)) != 1.0:
        problems.append(f"has partial_rotary_factor {share}; with latent attention it must be 1.")
    if family.is_mla and not reader.flag("rope_interleave", default=True):
        problems.append("has rope_interleave false; the rotated columns must be interleaved.")
    if family.is_sparse and config.get("q_lora_rank", 0) is None:  # null, unlike a missing field
        problems.append("has q_lora_rank null; the indexer of sparse attention reads the compressed queries.")
    return problems


def _refused_routing(reader: ConfigReader) -> list[str]:
    problems = []
    scoring = reader.config.get("scoring_func", "sigmoid")
    if scoring != "sigmoid":
        problems.append(f"has scoring_func {scoring!r}; only sigmoid is supported for this family.")
    if not reader.flag("norm_topk_prob", default=True):
        problems.append("has norm_topk_prob false; the scores of the chosen experts must be normalized.")
    groups, kept = reader.config.get("n_group") or 1, reader.config.get("topk_group") or 1
    topk = reader.config.get("num_experts_per_tok") or 0
    if groups > 1 and topk != 2 * kept:
        # Megatron ranks a group by its best topk / group_topk scores, the reference model always by its best two.
        problems.append(
            f"has num_experts_per_tok {topk}, topk_group {kept} with n_group {groups}: groups are built only if "
            "num_experts_per_tok is twice topk_group."
        )
    return problems
