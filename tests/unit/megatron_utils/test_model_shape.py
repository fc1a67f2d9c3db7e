"""The model's shape from config.json, and flags that contradict it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.model_shape import check_against_hf, read_shape
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_trainer import make_args

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 151,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
_GOOD_FLAGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 32,
    "vocab_size": 151,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 1000000,
    "qk_layernorm": True,
    "swiglu": True,
}


def _write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_full_set_of_matching_flags_is_accepted(tmp_path: Path) -> None:
    assert check_against_hf(make_args(_write(tmp_path, _QWEN3), **_GOOD_FLAGS)) == []
    assert check_against_hf(make_args(tmp_path)) == []


@pytest.mark.parametrize(
    ("flag", "bad", "field"),
    [
        ("num_layers", 3, "num_hidden_layers 2"),
        ("hidden_size", 65, "hidden_size 64"),
        ("ffn_hidden_size", 1, "intermediate_size 128"),
        ("num_attention_heads", 8, "num_attention_heads 4"),
        ("num_query_groups", 4, "num_key_value_heads 2"),
        ("kv_channels", 16, "head_dim 32"),
        ("vocab_size", 152, "vocab_size 151"),
        ("layernorm_epsilon", 1e-5, "rms_norm_eps 1e-06"),
        ("rotary_base", 10000, "rope_theta 1000000"),
    ],
)
def test_a_contradicting_flag_is_named_with_both_values(flag: str, bad: Any, field: str, tmp_path: Path) -> None:
    spelling = {"layernorm_epsilon": "--norm-epsilon"}.get(flag, "--" + flag.replace("_", "-"))
    (problem,) = check_against_hf(make_args(_write(tmp_path, _QWEN3), **(_GOOD_FLAGS | {flag: bad})))
    assert problem.startswith(f"{spelling} {bad} differs from {field}")


def test_every_contradiction_is_reported_at_once(tmp_path: Path) -> None:
    problems = check_against_hf(
        make_args(
            _write(tmp_path, _QWEN3),
            num_layers=9,
            add_qkv_bias=True,
            untie_embeddings_and_output_weights=True,
            use_rope_scaling=True,
        )
    )
    assert [problem.split()[0] for problem in problems] == [
        "--num-layers",
        "--add-qkv-bias",
        "--untie-embeddings-and-output-weights",
        "--use-rope-scaling",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'; supported are llama, qwen2, qwen3"),
        ({"model_type": None}, r"model_type None"),
        ({"attention_bias": True}, r"attention_bias True: biases in attention are not supported"),
        ({"use_sliding_window": True}, r"sliding-window attention are not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, r"rope type 'yarn'"),
        ({"hidden_size": None}, r"lacks hidden_size"),
    ],
)
def test_what_is_not_supported_is_said_before_anything_starts(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape(str(_write(tmp_path, _QWEN3 | change)))


def test_config_that_is_no_json_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in check_against_hf(make_args(tmp_path))[0]


def test_rope_settings_of_both_transformers_generations_are_read(tmp_path: Path) -> None:
    llama = _QWEN3 | {"model_type": "llama"}
    factors = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    old = read_shape(str(_write(tmp_path, llama | {"rope_scaling": factors})))
    del llama["rope_theta"]
    new = read_shape(str(_write(tmp_path, llama | {"rope_parameters": factors | {"rope_theta": 1000000}})))
    assert old == new
    assert new.llama3_rope is not None
    assert new.rotary_base == 1000000


def test_the_check_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, slime.backends.megatron_utils.model_shape, slime.backends.megatron_utils.arguments, "
        "slime.backends.megatron_utils.checkpoint_source; "
        "bad = {'torch', 'megatron', 'transformers', 'ray', 'sglang'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
