"""Products of deep_gemm (a fake) communicate like the layers whose products they replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.comparison import NASTY, PLAIN, assert_equal, assert_replicas_agree, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch

_DENSE = {"megatron_deepgemm_forward_layers": [0, 1]}
_EXPERTS = {"megatron_deepgemm_moe_forward_layers": [0]}


@pytest.mark.parametrize(
    ("family", "layout", "chosen"), [("qwen3", "tp2", _DENSE), ("qwen3_moe", "tp2 sp ep2 etp1", _DENSE | _EXPERTS)]
)
def test_a_layout_with_products_of_deep_gemm_trains_like_one_rank_without(
    family: str, layout: str, chosen: dict[str, Any], ranks: ForkServer, tmp_path: Path
) -> None:
    make_family_checkpoint(family, tmp_path / "hf")
    batch = make_batch(16, seed=1, lengths=NASTY)
    case = {"hf": str(tmp_path / "hf"), "batch": batch, "num_steps": 2}
    usual = PLAIN | layout_args("") | {"output_dir": str(tmp_path)}
    reference = main_rank(ranks.run("tests.dist.layout_cases:train", 1, **case, args=usual))
    args = usual | layout_args(layout) | chosen
    results = ranks.run("tests.dist.layout_cases:train_with_deep_gemm", 2, **case, args=args)
    assert_equal(reference, results)
    assert_replicas_agree(results)
