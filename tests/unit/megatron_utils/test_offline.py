"""The settings that the conversion tools derive from a command line under torchrun."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from slime.backends.megatron_utils.conversion import read_options
from slime.utils.errors import ConfigError

_TEXT = {
    **{"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "float32"},
}


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-checkpoint", required=True)


@pytest.mark.parametrize("config", [{"model_type": "qwen3", **_TEXT}, {"model_type": "qwen3_vl", "text_config": _TEXT}])
def test_processes_become_stages_of_the_language_model_in_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = read_options(_add_checkpoint, "a tool", ["--hf-checkpoint", str(tmp_path)])
    assert (args.pipeline_model_parallel_size, args.fp32, args.bf16) == (2, True, False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **_TEXT}))
    return ["--hf-checkpoint", str(tmp_path)]


def test_an_unknown_flag_of_a_tool_is_an_error(checkpoint: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--num-layer: unknown flag.*did you mean --num-layers"):
        read_options(_add_checkpoint, "a tool", [*checkpoint, "--num-layer", "4"])


def test_tasks_of_srun_are_ranks(checkpoint: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what the tool sets is undone
        monkeypatch.delenv(name)
    for name, value in {"NTASKS": 2, "PROCID": 1, "LOCALID": 1, "STEP_ID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(ConfigError, match=r"srun started 2 tasks.*MASTER_ADDR"):
        read_options(_add_checkpoint, "a tool", checkpoint)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert read_options(_add_checkpoint, "a tool", checkpoint).pipeline_model_parallel_size == 2
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"]) == ("1", "1", "23456")
