"""The sections of the plan, and how it is printed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.groups import Notice
from slime.config.plan import SCHEMA, Plan, build, plan_batch, plan_files
from slime.config.plan.placement import Placement, PlanError, plan_placement, read_layout
from slime.config.plan.render import count, render, size
from slime.config.plan.shape import read_shape
from slime.models.cost import num_parameters
from tests.unit.config.plan_args import plan_args

GIB = 2**30


def placement(**flags: Any) -> Placement:
    args = plan_args(**flags)
    return plan_placement(args, read_layout(args))


def printed(plan: Plan) -> str:
    stream = io.StringIO()
    render(plan, stream)
    return stream.getvalue()


def test_engines_stand_behind_the_trainer() -> None:
    plan = placement(world_size=8, rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    assert [(group.first_slot, group.num_engines) for group in plan.engines] == [(8, 4)]
    assert (plan.num_nodes, plan.num_slots) == (2, 16)
    assert [node.engines for node in plan.nodes] == [[], ["engines 0-3"]]


def test_colocated_engines_stand_on_the_trainers_slots() -> None:
    plan = placement(world_size=8, rollout_num_gpus=8, colocate=True)
    assert plan.engines[0].first_slot == 0
    assert plan.num_slots == 8


def test_the_plan_shows_whose_turn_it_is_on_shared_devices() -> None:
    taken = build(plan_args(colocate=True, offload_train=True, offload_rollout=True), title="t", device_bytes=GIB)
    assert [turn.name for turn in taken.turns] == ["rollout", "training, saving", "weight sync"]
    assert [turn.engines for turn in taken.turns] == ["weights, KV cache", "nothing", "weights"]
    assert taken.turns[0].trainer.startswith("nothing")
    assert "Turns on shared devices" in printed(taken)
    ended = build(plan_args(colocate=True, release_train=True, offload_rollout=True), title="t", device_bytes=GIB)
    assert ended.turns[0].trainer == "no process"
    assert [turn.trainer for turn in ended.turns[1:]] == ["weights, gradients, optimizer", "weights"]
    with_critic = build(plan_args(use_critic=True, offload_train=True), title="t", device_bytes=GIB)
    assert [turn.engines for turn in with_critic.turns] == ["weights, KV cache"] * 4
    assert "Turns" not in printed(build(plan_args(), title="t", device_bytes=GIB))


def test_a_node_shows_the_coordinates_of_its_ranks() -> None:
    plan = placement(world_size=16, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, rollout_num_gpus=8)
    assert plan.nodes[0].coordinates["pp"] == (0, 0)
    assert plan.nodes[1].coordinates == {"tp": (0, 3), "cp": (0, 0), "dp": (0, 1), "pp": (1, 1), "ep": (0, 0)}


def test_an_engine_over_two_nodes_is_listed_on_both() -> None:
    plan = placement(world_size=8, rollout_num_gpus=16, rollout_num_gpus_per_engine=16)
    assert [node.engines for node in plan.nodes] == [[], ["engine 0"], ["engine 0"]]


def test_prefill_engines_come_first() -> None:
    plan = placement(rollout_num_gpus=6, prefill_num_servers=2)
    assert [(group.kind, group.num_engines, group.first_slot) for group in plan.engines] == [
        ("prefill", 2, 2),
        ("decode", 4, 4),
    ]


def test_engines_of_somebody_else_take_no_slot() -> None:
    plan = placement(rollout_external_engine_addrs=["a:1", "b:1"])
    assert plan.num_slots == 2
    assert plan.engines[0].first_slot is None


def test_engine_groups_are_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(
        "sglang:\n  - name: main\n    num_gpus_per_engine: 2\n    server_groups:\n"
        "      - {worker_type: regular, num_gpus: 4}\n  - name: judge\n    server_groups:\n"
        "      - {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}\n"
    )
    plan = placement(sglang_config=str(file))
    assert [(group.model, group.num_engines, group.first_slot) for group in plan.engines] == [
        ("main", 2, 2),
        ("judge", 1, 6),
    ]
    assert plan.routers == ["main", "judge"]


def test_an_engine_file_without_devices_is_named(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("sglang:\n  - {name: main, server_groups: [{worker_type: regular}]}\n")
    with pytest.raises(PlanError, match="has no num_gpus"):
        placement(sglang_config=str(file))


def test_training_alone_has_no_engine_and_generating_alone_no_trainer() -> None:
    assert placement(debug_train_only=True).engines == []
    assert placement(debug_rollout_only=True).num_trainer_ranks == 0


def test_a_batch_that_does_not_add_up_is_shown_as_such() -> None:
    args = plan_args(global_batch_size=7)
    assert not plan_batch(args, read_layout(args)).is_consistent
    assert "= 8 ≠ global batch 7 x 1 step" in printed(build(args, title="t", device_bytes=GIB))


def test_the_length_of_the_run_follows_from_the_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' * 21)
    args = plan_args(num_rollout=None, num_epoch=2, prompt_data=str(file))
    assert plan_batch(args, read_layout(args)).num_rollouts == 2 * (21 // 4)


def test_the_share_of_tokens_that_share_prefixes_would_leave_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "{"a" * 386}"}}\n' * 3)  # 400 bytes, about 100 tokens
    args = plan_args(prompt_data=str(file), n_samples_per_prompt=4, rollout_max_response_len=50)
    share, _ = plan_batch(args, read_layout(args)).unique or (0.0, "")
    assert share == pytest.approx((100 + 4 * 50) / (4 * 150), rel=1e-2)
    for in_dump, text in ((None, "50% of the tokens pass"), (0.625, "62% of the tokens pass")):
        plan = build(args, title="t", device_bytes=GIB, unique_in_dump=in_dump)
        assert f"{text} the trainer with --share-prefixes" in " ".join(printed(plan).split())  # a terminal wraps lines


def test_micro_batches_of_a_fixed_size_are_counted_per_rank() -> None:
    args = plan_args(global_batch_size=8, micro_batch_size=2)
    assert plan_batch(args, read_layout(args)).micro_batches == 2


def test_checkpoints_are_priced_with_their_optimizer() -> None:
    args = plan_args(save="ckpt", save_hf="hf/{rollout_id}", save_interval=5)
    shape = read_shape(args)
    sizes = {output.what: output.bytes for output in plan_files(args, shape)}
    assert sizes["checkpoint"] == 14 * num_parameters(shape)
    assert sizes["Hugging Face checkpoint"] == 2 * num_parameters(shape)
    args.no_save_optim = True
    assert {output.what: output.bytes for output in plan_files(args, shape)}["checkpoint"] == 2 * num_parameters(shape)


def test_a_section_that_cannot_be_worked_out_leaves_the_others() -> None:
    plan = build(plan_args(num_layers=None), title="t", device_bytes=GIB)
    assert plan.batch is not None
    assert plan.shape is None
    assert any("--num-layers" in gap for gap in plan.gaps)
    assert "Not worked out" in printed(plan)


@pytest.mark.parametrize(
    "flags",
    [
        {"num_experts": 4},
        {"kv_lora_rank": 3},
        {"context_parallel_size": 0},
        {"rollout_num_gpus_per_engine": 0},
        {"micro_batch_size": 0},
        {"moe_layer_freq": [1], "num_experts": 4, "moe_router_topk": 2},
        {"sglang_config": "no-such-file.yaml"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_a_wrong_flag_becomes_a_gap_and_breaks_nothing(flags: dict[str, Any]) -> None:
    plan = build(plan_args(**flags), title="t", device_bytes=GIB)
    assert plan.gaps
    assert "Not worked out" in printed(plan)


def test_problems_decide_whether_it_would_start() -> None:
    assert "would start" in printed(build(plan_args(), title="t", device_bytes=GIB))
    text = printed(build(plan_args(), title="t", device_bytes=GIB, problems=["--lr -1 [red] is wrong."]))
    assert "would not start: 1 problem" in text
    assert "--lr -1 [red] is wrong." in text


def test_notices_and_ignored_flags_are_listed() -> None:
    args = plan_args(notices=[Notice("warning", "--rm-type", "guessed")])
    text = printed(build(args, title="t", device_bytes=GIB, ignored=[("--http-proxy", "nothing reads it")]))
    assert "--rm-type" in text
    assert "--http-proxy" in text


def test_buckets_take_the_share_of_the_free_memory_that_the_run_gives_them() -> None:
    from slime.weight_sync.chunks import bucket_bytes

    args = plan_args(world_size=1, colocate=True, offload_train=True, rollout_num_gpus=1)
    for memory in (1, 10 * GIB, 80 * GIB):
        plan = build(args, title="t", device_bytes=memory)
        assert plan.sync is not None
        assert plan.engine is not None
        free = max(0, memory - plan.stages[0].weights - plan.engine.weights)
        assert plan.sync.buffer_bytes == bucket_bytes(free)
    assert plan.sync.buffer_bytes == 2 * GIB


def test_a_model_that_does_not_fit_is_marked() -> None:
    text = printed(build(plan_args(), title="t", device_bytes=1000))
    assert "does not fit" in text
    assert "the weights alone exceed" in text


def test_host_memory_and_links_are_shown_if_the_run_uses_them() -> None:
    assert "Host memory" in printed(build(plan_args(), title="t", device_bytes=GIB)), "the buffers of a save"
    shared = plan_args(colocate=True, offload_train=True, rollout_num_gpus=16, world_size=16, context_parallel_size=2)
    text = printed(build(shared, title="t", device_bytes=GIB, host_bytes=2**20))
    assert "pinned, for 8 trainer ranks" in text
    assert "does not fit" in text
    assert "CUDA IPC" in text
    apart = printed(build(plan_args(world_size=8), title="t", device_bytes=GIB))
    assert "by network (50 GB/s): at least" in apart
    assert "other context-parallel ranks" in text
    assert "other context-parallel ranks" not in apart


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {
            "world_size": 512,
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 4,
            "rollout_num_gpus": 512,
        },
        {
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "world_size": 8,
            "expert_model_parallel_size": 8,
        },
        {"use_critic": True, "colocate": True, "use_kl_loss": True},
    ],
    ids=["small", "large", "experts", "critic"],
)
def test_no_line_is_wider_than_100_columns_and_none_has_colour(flags: dict[str, Any]) -> None:
    text = printed(build(plan_args(**flags), title="a" * 60, device_bytes=80 * GIB))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_long_clusters_show_their_first_and_last_nodes() -> None:
    text = printed(build(plan_args(world_size=512, rollout_num_gpus=512), title="t", device_bytes=GIB))
    assert "..." in text
    assert "127" in text


def test_the_json_is_plain_and_says_its_schema() -> None:
    plan = build(plan_args(), title="t", device_bytes=GIB)
    values = json.loads(json.dumps(plan.as_dict()))
    assert values["schema"] == SCHEMA
    assert values["shape"]["num_parameters"] == num_parameters(plan.shape) if plan.shape else False
    assert values["stages"][0]["total"] == plan.stages[0].total
    assert set(values) == {
        *("schema", "is_startable", "title", "device_bytes", "batch", "layout", "placement", "shape", "precision"),
        *("tokens", "stages", "engine", "sync", "turns", "outputs", "ignored", "notices", "problems", "missing"),
        *("gaps", "host", "host_bytes", "is_cpu", "num_trainable"),
    }


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "0.999 KiB"),
        (1024, "1 KiB"),
        (1610612736, "1.5 GiB"),
        (80 * GIB, "80 GiB"),
        (3000 * 2**50, "3000 PiB"),
    ],
)
def test_sizes_read_well(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(("number", "text"), [(992, "992"), (4022468096, "4.02 B"), (671026404352, "671 B")])
def test_counts_read_well(number: int, text: str) -> None:
    assert count(number) == text
