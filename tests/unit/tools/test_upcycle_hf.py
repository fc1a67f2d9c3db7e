"""A model with experts that was made of a dense one begins as the dense one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.utils.errors import ConfigError
from tests.programs import run_program
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_hf_model
from tools.upcycle_hf import Upcycling


@pytest.mark.parametrize(("copies", "slices", "topk"), [(4, 1, 2), (3, 4, 8)])
def test_the_first_logits_are_those_of_the_dense_model(copies: int, slices: int, topk: int, tmp_path: Path) -> None:
    import transformers

    dense = make_hf_model("qwen3", tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer_config.json").write_text("{}")
    words = ["--copies", str(copies), "--slices", str(slices), "--topk", str(topk)]
    paths = ["--input", str(tmp_path / "dense"), "--output", str(tmp_path / "moe")]
    run_program("tools/upcycle_hf.py", *paths, *words).check_returncode()
    sparse = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    assert sparse.config.num_experts == copies * slices
    assert (tmp_path / "moe" / "tokenizer_config.json").exists()
    tokens = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = sparse(tokens).logits, dense(tokens).logits
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_settings_that_would_not_begin_as_the_dense_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="--topk 6 must be a multiple of --slices 4"):
        Upcycling(copies=4, slices=4, topk=6)
    with pytest.raises(ConfigError, match="--slices 5 must divide the intermediate_size 48"):
        Upcycling(copies=2, slices=5, topk=5).config({"model_type": "qwen3", "intermediate_size": 48})
    with pytest.raises(ConfigError, match="'llama'; only qwen3"):
        Upcycling(copies=2, slices=1, topk=1).config({"model_type": "llama"})
