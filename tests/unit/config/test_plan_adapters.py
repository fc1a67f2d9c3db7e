"""Runs with adapters in the plan: trainable parameters, memory with and without adapters, bytes of a sync."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.feature_rules import _SLOTS
from slime.config.groups import from_args
from slime.config.plan import Plan, build
from slime.config.plan.engine import SLOTS, serves_adapter
from slime.data.engine_fields import FieldFlags
from tests.unit.config.plan_args import plan_args
from tests.unit.config.test_plan_build import printed
from tests.unit.config.tiny_command import QWEN3, make_model

LORA: dict[str, Any] = {
    **{"lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_target_modules": None, "lora_merge": False},
    **{"lora_adapter_path": None, "lora_experts": False, "lora_use_rslora": False},
}
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
ENDS = 512 * 64 + 64
BASE = 2 * LAYER + ENDS
ADAPTER = 4 * ((64 + 64) + 2 * (32 + 64) + (64 + 64) + 3 * (128 + 64))
"""Of one layer: q, k and v, o, and the three of the MLP."""
TRAINED = 2 * ADAPTER


@pytest.fixture
def args(tmp_path: Path) -> Any:
    model = make_model(tmp_path / "model", QWEN3)

    def make(**flags: Any) -> Namespace:
        shape = {"num_layers": 2, "vocab_size": 512, "untie_embeddings_and_output_weights": None, "qk_layernorm": True}
        return plan_args(hf_checkpoint=model, **shape, **LORA | flags)

    return make


def _plan(args: Namespace) -> Plan:
    plan = build(args, title="t", device_bytes=2**30)
    assert not plan.gaps
    return plan


def test_a_rank_of_megatron_has_gradients_and_states_of_adapters_only(args: Any) -> None:
    plan, whole = _plan(args()), _plan(args(lora_rank=0))
    (stage,), (without,) = plan.stages, whole.stages
    assert (stage.trained, plan.num_trainable, whole.num_trainable) == (TRAINED, TRAINED, 0)
    assert (stage.parameters, stage.weights) == (BASE + TRAINED, 2 * (BASE + TRAINED))
    assert (stage.gradients, stage.optimizer) == (4 * TRAINED, 12 * TRAINED // 2)
    assert (without.parameters, without.gradients, without.optimizer) == (BASE, 4 * BASE, 12 * BASE // 2)
    assert (stage.without_adapters, without.without_adapters) == (without.total, 0)
    assert stage.activations == without.activations


def test_tensor_ranks_share_one_matrix_of_each_adapter(args: Any) -> None:
    (stage,) = _plan(args(tensor_model_parallel_size=2)).stages
    column, row = lambda rows, width: 4 * (rows // 2 + width), lambda rows, width: 4 * (rows + width // 2)
    layer = column(64, 64) + 2 * column(32, 64) + row(64, 64) + 2 * column(128, 64) + row(64, 128)
    assert stage.trained == 2 * layer
    stages = _plan(args(pipeline_model_parallel_size=2)).stages
    assert [stage.trained for stage in stages] == [ADAPTER, ADAPTER]


def test_fsdp_shards_the_frozen_weights_in_the_computing_precision(args: Any) -> None:
    plan, whole = _plan(args(train_backend="fsdp")), _plan(args(train_backend="fsdp", lora_rank=0))
    (stage,), (without,) = plan.stages, whole.stages
    assert (stage.parameters, stage.trained) == ((BASE + TRAINED) // 2, TRAINED // 2)
    gathered = 2 * (ENDS + 2 * LAYER)
    assert stage.weights == 2 * BASE // 2 + 4 * TRAINED // 2 + gathered + 2 * 2 * ADAPTER
    assert stage.gradients == 4 * (TRAINED // 2 + ADAPTER)
    assert stage.optimizer == 8 * TRAINED // 2
    assert without.weights == 4 * BASE // 2 + gathered
    assert stage.without_adapters == without.total
    (moved,) = _plan(args(train_backend="fsdp", offload_train=True)).stages
    assert moved.host_copies == 2 * BASE // 2 + 4 * TRAINED // 2


def test_a_sync_sends_the_adapters_and_the_base_once(args: Any) -> None:
    plan = _plan(args())
    assert plan.sync is not None
    assert (plan.sync.bytes, plan.sync.base_bytes) == (2 * TRAINED, 2 * BASE)
    assert (plan.sync.received, plan.sync.seconds) == ({}, 0)
    for flags in ({"lora_rank": 0}, {"lora_merge": True}):
        sync = _plan(args(**flags)).sync
        assert sync is not None
        assert (sync.bytes, sync.base_bytes) == (2 * BASE, 0)
        assert sync.received["NVLink"] == 2 * BASE
    text = printed(plan)
    assert "16 KiB of adapters, and 209 KiB once, in 1 bucket" in text, text
    assert "8.19 K (8,192), and nothing else is trained" in text
    assert "without adapters" in text


def test_engines_have_memory_for_two_adapters_and_a_copy_of_the_base_on_shared_devices(args: Any) -> None:
    with_adapter, without = (_plan(args(lora_rank=rank, offload_rollout=True, colocate=True)) for rank in (4, 0))
    assert with_adapter.engine is not None
    assert without.engine is not None
    assert SLOTS == _SLOTS
    assert with_adapter.engine.weights - without.engine.weights == SLOTS * 2 * TRAINED
    assert with_adapter.host is not None
    assert with_adapter.host.copies == 2 * with_adapter.engine.weights, "of two engines"
    assert without.host is None or without.host.copies == 0


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ({}, (2, 14, 2)),
        ({"train_backend": "fsdp"}, (4, 14, 2)),
    ],
    ids=["megatron", "fsdp"],
)
def test_files_hold_adapters_unless_they_are_merged(args: Any, flags: dict[str, Any], numbers: Any) -> None:
    paths = {"save": "c", "save_hf": "h", "update_weight_transport": "disk", "update_weight_disk_dir": "d"}
    found = {output.where: output.bytes for output in _plan(args(**paths, **flags)).outputs}
    assert (found["h"], found["c"], found["d"]) == tuple(TRAINED * width for width in numbers)
    merged = {output.where: output.bytes for output in _plan(args(**paths, **flags, lora_merge=True)).outputs}
    assert (merged["h"], merged["c"], merged["d"]) == (2 * BASE, 14 * TRAINED, 2 * BASE)


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 0}, {"lora_merge": True}, {"debug_rollout_only": True}])
def test_the_plan_and_the_run_agree_on_engines_with_adapters(args: Any, flags: dict[str, Any]) -> None:
    assert serves_adapter(args(**flags)) == from_args(FieldFlags, args(**flags)).serves_adapter == (not flags)
