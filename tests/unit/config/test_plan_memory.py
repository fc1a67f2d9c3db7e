"""Memory estimates of the plan: exact where they can be, and with the right sensitivities where they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.plan import memory as plan_memory
from slime.config.plan.devices import host_memory
from slime.config.plan.engine import ASSUMED_FRACTION, LINKS, count_buckets, engine_memory, weight_sync
from slime.config.plan.memory import StageMemory, precision_of, stage_memory, tokens_per_micro_batch
from slime.config.plan.placement import Layout, PlanError, plan_placement, read_layout, stage_layers
from slime.config.plan.shape import read_shape
from slime.models.cost import Weight
from tests.unit.config.plan_args import plan_args
from tests.unit.config.tiny_command import QWEN3, make_command, make_model

LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
"""Attention with half as many key/value heads, gated MLP, two norms."""
VOCAB = 1024
"""1000 rows padded to a multiple of 128."""
GIB = 2**30


def memory(**flags: Any) -> list[StageMemory]:
    args = plan_args(**flags)
    return stage_memory(args, read_shape(args), read_layout(args))


def test_one_rank_holds_the_whole_padded_model() -> None:
    (stage,) = memory(world_size=1)
    assert stage.parameters == 4 * LAYER + 2 * VOCAB * 64 + 64


def test_mixed_precision_costs_two_bytes_four_bytes_and_twelve() -> None:
    (stage,) = memory(world_size=1)
    assert (stage.weights, stage.gradients, stage.optimizer) == tuple(stage.parameters * x for x in (2, 4, 12))


def test_fp32_needs_no_main_copy() -> None:
    (stage,) = memory(world_size=1, fp32=True)
    assert (stage.weights, stage.gradients, stage.optimizer) == tuple(stage.parameters * x for x in (4, 4, 8))


def test_only_the_optimizer_is_sharded_over_data_parallel_ranks() -> None:
    (one,), (four,) = memory(world_size=1), memory(world_size=4)
    assert (four.weights, four.gradients) == (one.weights, one.gradients)
    assert four.optimizer == one.optimizer // 4


def test_fsdp_divides_everything_among_all_ranks_but_what_is_gathered() -> None:
    parameters = 4 * LAYER + 2 * 1000 * 64 + 64  # no padding
    whole = 2 * 1000 * 64 + 64
    (one,), (four,) = (memory(world_size=n, train_backend="fsdp", context_parallel_size=n) for n in (1, 4))
    assert one.parameters == parameters
    assert four.parameters == one.parameters // 4
    assert (one.optimizer, four.optimizer) == (8 * parameters, 2 * parameters)
    assert four.weights == parameters + 2 * (whole + 2 * LAYER)
    assert one.weights - four.weights == one.gradients - four.gradients == 3 * parameters
    assert memory(train_backend="fsdp", fp32=True)[0].optimizer == memory(train_backend="fsdp")[0].optimizer


def test_an_optimizer_that_is_not_distributed_is_whole_on_every_rank() -> None:
    (stage,) = memory(world_size=4, use_distributed_optimizer=False)
    assert stage.optimizer == 12 * stage.parameters


def test_an_optimizer_on_the_host_takes_no_device_memory() -> None:
    (device,) = memory()
    (host,) = memory(optimizer_cpu_offload=True)
    assert (host.optimizer, host.host_states) == (0, device.optimizer)
    (half,) = memory(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half.optimizer == half.host_states == device.optimizer // 2


def test_instances_of_the_optimizer_have_all_states_each() -> None:
    (one,), (two,) = memory(world_size=4), memory(world_size=4, num_distributed_optimizer_instances=2)
    assert two.optimizer == 2 * one.optimizer


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    (one,), (two,) = memory(world_size=1), memory(world_size=2, tensor_model_parallel_size=2)
    norms = 64 * (2 * 4 + 1)
    assert two.parameters - norms == (one.parameters - norms) // 2


def test_pipeline_stages_add_up_to_the_model() -> None:
    stages = memory(world_size=4, pipeline_model_parallel_size=4)
    assert sum(stage.parameters for stage in stages) == memory(world_size=1)[0].parameters
    assert [stage.layers for stage in stages] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_tied_head_on_another_stage_is_a_second_copy() -> None:
    stages = memory(world_size=2, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False)
    whole = memory(world_size=1, untie_embeddings_and_output_weights=False)[0].parameters
    assert sum(stage.parameters for stage in stages) == whole + VOCAB * 64


def test_experts_are_dealt_out_and_their_states_sharded_over_their_own_copies() -> None:
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
    (one,) = memory(world_size=1, **experts)
    (four,) = memory(world_size=4, expert_model_parallel_size=4, **experts)
    all_experts = 4 * 8 * 3 * 64 * 32
    assert one.parameters - four.parameters == all_experts * 3 // 4
    dense = one.parameters - all_experts
    assert four.optimizer == 12 * (dense // 4 + all_experts // 4)  # one copy of each expert: nothing left to share


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    stages = memory(world_size=4, pipeline_model_parallel_size=4, global_batch_size=64)
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    assert stages[0].activations == 4 * stages[3].activations


def test_no_more_micro_batches_are_alive_than_a_step_has() -> None:
    stages = memory(world_size=4, pipeline_model_parallel_size=4, global_batch_size=2)
    assert stages[0].in_flight == 2


def test_activations_grow_with_the_tokens_of_a_micro_batch() -> None:
    flags: dict[str, Any] = {"use_dynamic_batch_size": True, "log_probs_chunk_size": -1}
    short = memory(max_tokens_per_gpu=1000, **flags)[0]
    long = memory(max_tokens_per_gpu=3000, **flags)[0]
    assert (long.activations, long.logits) == (3 * short.activations, 3 * short.logits)


def test_full_recomputation_keeps_one_input_per_layer_and_one_layer() -> None:
    flags: dict[str, Any] = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000}
    stored = memory(**flags)[0].activations
    recomputed = memory(**flags, recompute_granularity="full", recompute_num_layers=1)[0].activations
    assert recomputed == 4 * 1000 * 64 * 2 + stored // 4


def test_recomputing_a_block_stores_the_other_layers() -> None:
    flags: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block"}
    some, all_ = (memory(**flags, recompute_num_layers=count)[0].activations for count in (1, 4))
    assert all_ < some < memory()[0].activations + memory()[0].activations


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    whole, sharded = (
        memory(tensor_model_parallel_size=2, sequence_parallel=flag)[0].activations for flag in (False, True)
    )
    assert whole - sharded == 4 * 100 * 2 * 4 * 64 / 2  # layers x tokens x bytes x four inputs of h numbers, half


def test_a_chunked_softmax_saves_memory() -> None:
    small, default, whole = (memory(log_probs_chunk_size=size)[0].logits for size in (10, None, -1))
    assert small < default <= whole


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 512}, 512),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}, 100),  # a longer sample travels alone
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "context_parallel_size": 2, "world_size": 2}, 64),
        ({"micro_batch_size": 3}, 300),
        ({"rollout_max_context_len": 400}, 400),
        ({"rollout_max_prompt_len": 50}, 150),
        ({"world_size": 2, "context_parallel_size": 2}, 50),
    ],
)
def test_the_largest_micro_batch_follows_from_the_flags(flags: dict[str, Any], tokens: int) -> None:
    assert tokens_per_micro_batch(plan_args(**flags)).count == tokens


def test_precision_aware_states_are_counted_in_their_types() -> None:
    args = plan_args(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8", main_params_dtype="fp16", main_grads_dtype="bf16")
    assert (precision_of(args).states, precision_of(args).gradients) == (2 + 1 + 2, 2)


def test_ranks_are_ordered_tensor_context_data_pipeline() -> None:
    layout = read_layout(
        plan_args(world_size=16, tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
    )
    fifth, last = layout.ranks[5], layout.ranks[15]
    assert (fifth.tp, fifth.cp, fifth.dp, fifth.pp) == (1, 0, 1, 0)
    assert (last.tp, last.cp, last.dp, last.pp) == (1, 1, 1, 1)


def test_a_world_that_does_not_divide_is_named() -> None:
    with pytest.raises(PlanError, match="6 trainer ranks do not divide by TP 4"):
        read_layout(plan_args(world_size=6, tensor_model_parallel_size=4))


def test_the_last_stage_may_have_fewer_layers() -> None:
    stages = stage_layers(plan_args(decoder_last_pipeline_num_layers=1), 7, 3)
    assert [len(stage) for stage in stages] == [3, 3, 1]


def test_embedding_and_loss_may_count_as_layers() -> None:
    flags = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert [len(stage) for stage in stage_layers(plan_args(**flags), 6, 4)] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    "flag", ["--num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 1"]
)
def test_interleaved_stages_keep_more_micro_batches(flag: str, tmp_path: Path) -> None:
    command = make_command(tmp_path)
    make_model(Path(command.model), QWEN3 | {"num_hidden_layers": 4})
    args = command.resolve(*flag.split(), "--pipeline-model-parallel-size", 2)
    stages = stage_memory(args, read_shape(args), read_layout(args))
    assert [stage.in_flight for stage in stages] == [3, 2]


def test_layers_that_do_not_divide_are_named() -> None:
    with pytest.raises(PlanError, match="7 layers do not divide over 2"):
        stage_layers(plan_args(), 7, 2)


def engine(**flags: Any) -> Any:
    args = plan_args(**flags)
    return engine_memory(args, read_shape(args), GIB)


def test_an_engine_caches_keys_and_values_of_every_layer() -> None:
    assert engine().kv_per_token == 4 * 2 * 2 * 16 * 2  # layers, keys and values, heads, width, bytes
    assert engine(sglang_kv_cache_dtype="fp8_e4m3").kv_per_token == 4 * 2 * 2 * 16


def test_key_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    two, four = (engine(rollout_num_gpus_per_engine=size).kv_per_token for size in (2, 4))
    assert two == four == engine().kv_per_token // 2


def test_latent_attention_caches_the_compressed_stream_on_every_rank() -> None:
    latent = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10}
    assert engine(**latent).kv_per_token == engine(rollout_num_gpus_per_engine=4, **latent).kv_per_token == 4 * 28 * 2


def test_the_cache_gets_what_the_weights_leave() -> None:
    plan = engine(sglang_mem_fraction_static=0.5)
    assert plan.pool == GIB // 2 - plan.weights
    assert plan.tokens == plan.pool // plan.kv_per_token
    assert engine().fraction == ASSUMED_FRACTION


def test_data_parallel_attention_multiplies_the_tokens_of_an_engine() -> None:
    flags: dict[str, Any] = {"rollout_num_gpus_per_engine": 2, "sglang_mem_fraction_static": 0.5}
    one, two = engine(**flags), engine(**flags, sglang_enable_dp_attention=True, sglang_dp_size=2)
    assert two.kv_per_token == 2 * one.kv_per_token  # every device has all heads of its tokens
    assert two.tokens == pytest.approx(one.tokens, rel=0.01)


def test_a_limit_on_tokens_is_honoured() -> None:
    assert engine(sglang_max_total_tokens=1234).tokens == 1234


def test_weights_larger_than_the_device_leave_no_cache() -> None:
    args = plan_args()
    assert engine_memory(args, read_shape(args), 1000).tokens == 0


@pytest.mark.parametrize(
    ("quantised", "share"),
    [
        ({"quant_method": "fp8"}, 2),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, 1),
        ({"quant_method": "somebody's"}, 1),
    ],
)
def test_a_quantised_checkpoint_is_served_in_its_bits(quantised: dict[str, Any], share: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    assert engine(hf_checkpoint=str(tmp_path)).weights == engine().weights // share


def sync(**flags: Any) -> Any:
    args = plan_args(**flags)
    return weight_sync(args, read_shape(args), read_layout(args), args.num_rollout)


def test_a_sync_sends_every_parameter_without_padding() -> None:
    assert sync().bytes == 2 * (4 * LAYER + 2 * 1000 * 64 + 64)


def test_syncs_are_counted_with_the_first_and_the_last() -> None:
    assert (sync().num_syncs, sync(update_weights_interval=4).num_syncs) == (11, 4)


@pytest.mark.parametrize(
    ("sizes", "buckets"), [([], 0), ([4, 4, 4], 2), ([9], 1), ([20, 1, 20], 3), ([5, 5, 5, 5, 5], 3)]
)
def test_buckets_are_filled_in_order_and_a_large_tensor_travels_alone(sizes: list[int], buckets: int) -> None:
    assert count_buckets(iter(sizes), 10) == buckets


def test_buckets_equal_those_that_are_sent() -> None:
    import torch

    from slime.weight_sync.chunks import into_chunks

    sizes = [(7 * index) % 23 + 1 for index in range(200)]
    chunks = into_chunks(((str(i), torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes)), 40)
    assert count_buckets(iter(sizes), 40) == len(list(chunks))


def test_every_pipeline_stage_fills_buckets_of_its_own() -> None:
    assert sync().buckets == 1
    assert sync(world_size=2, pipeline_model_parallel_size=2).buckets == 2


def test_expert_copies_are_the_ranks_that_hold_the_same_expert() -> None:
    assert Layout(64, tp=4, pp=2, cp=1, ep=8, etp=1, vpp=1, has_sequence_parallel=True).edp == 4


def test_context_parallel_ranks_hold_the_keys_of_all_of_them() -> None:
    """Keys and values of two heads of 16: 64 numbers of a token, in 2 bytes. The own ones are counted as without it."""
    flags = {"world_size": 4, "context_parallel_size": 4, "micro_batch_size": 4, "recompute_granularity": "full"}
    (stage,) = memory(**flags, recompute_num_layers=1)
    assert stage.gathered_keys == 100 * 2 * 64 * (
        3.5 + 4
    )  # a copy in the order of the chunks, beside what was gathered
    assert memory(world_size=4)[0].gathered_keys == 0
    latent = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    (stage,) = memory(**flags, **latent, recompute_num_layers=1)
    assert stage.gathered_keys == 100 * 2 * (4 * 2 * 24 * (3.5 + 4) + 4 * (32 + 8))


def test_the_buffers_of_a_save_are_those_of_its_writer() -> None:
    from slime.backends.megatron_utils.patches import install

    install()  # before the first import of megatron.core, for all tests of this process
    from slime.backends.megatron_utils.checkpoint import shard_files, writer
    from slime.backends.training import pieces

    assert plan_memory._BUFFERS_AT_SAVE == pieces._NUM_THREADS * shard_files._MAX_BYTES
    assert plan_memory._COPIED_AT_SAVE == writer._COPIED_BYTES
    (stage,) = memory(async_save=True)
    assert stage.host_save == 4 * stage.parameters
    assert memory()[0].host_save == 2**28


def test_copies_of_weights_are_those_of_the_models_that_share_the_device() -> None:
    """Pinned block by block: norms and projections of this model are powers of two, and so are their blocks."""
    (stage,) = memory(world_size=1, offload_train=True)
    assert stage.host_copies == pytest.approx(stage.weights, rel=0.2)
    assert stage.host_copies >= stage.weights
    assert stage.host_offloaded == stage.optimizer
    (reference,) = memory(world_size=1, offload_train=True, use_kl_loss=True)
    assert (
        reference.host_copies == 3 * stage.host_copies
    )  # the reference, the actor beside it, the actor when offloaded
    assert memory(world_size=1)[0].host_copies == 0


def test_small_pinned_blocks_are_powers_of_two_and_large_ones_exact() -> None:
    layout = read_layout(plan_args(world_size=1))
    small, large = Weight("x", 3 * 2**20, count=2), Weight("x", 33 * 2**20)
    assert plan_memory._blocks(small, layout, 2) == 2 * 8 * 2**20
    assert plan_memory._blocks(large, layout, 2) == 66 * 2**20


def test_the_fullest_node_is_that_of_the_largest_stage() -> None:
    args = plan_args(
        **{"world_size": 16, "pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
        **{"offload_train": True, "optimizer_cpu_offload": True, "colocate": True, "rollout_num_gpus": 16},
    )
    shape, layout = read_shape(args), read_layout(args)
    stages = stage_memory(args, shape, layout)
    host = host_memory(args, layout, stages, plan_placement(args, layout), None)
    assert (host.node, host.ranks) == (1, 8)
    assert host.copies == 8 * stages[1].host_copies
    assert host.states == 8 * stages[1].host_states
    assert host.total == host.copies + host.states + host.save
    args.offload_rollout, args.update_weights_interval = True, 2
    engine = engine_memory(args, shape, 80 * GIB)
    kept = host_memory(args, layout, stages, plan_placement(args, layout), engine)
    assert kept.copies == host.copies + 8 * engine.weights


def test_a_shared_device_receives_the_shards_of_the_other_stages_and_the_experts_of_its_engine() -> None:
    moe = {"num_experts": 16, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "expert_model_parallel_size": 16}
    flags = {"colocate": True, "world_size": 32, "rollout_num_gpus": 32, "pipeline_model_parallel_size": 2}
    plan = sync(**moe, **flags, tensor_model_parallel_size=2, expert_tensor_parallel_size=1, sglang_ep_size=8)
    experts = 2 * 4 * 16 * 3 * 64 * 64
    dense = plan.bytes - experts
    stages = (dense / 2 + experts / 16) / 2
    assert plan.received["network"] == pytest.approx(stages + experts / 8 / 2)  # half of 16 ranks are on another node
    assert plan.received["NVLink"] == pytest.approx(dense / 2 + experts / 8 * (15 / 16 - 1 / 2))
    assert plan.seconds == pytest.approx(sum(size / LINKS[link] for link, size in plan.received.items()))
    assert "CUDA IPC" in plan.transport


def test_an_engine_elsewhere_receives_the_model_and_files_no_device() -> None:
    assert sync(world_size=8, rollout_num_gpus=8).received == {"NVLink": 0, "network": sync().bytes}
    assert sync(world_size=4, rollout_num_gpus=4).received == {"NVLink": sync().bytes, "network": 0}
    assert sync(update_weight_transport="disk").seconds == 0
