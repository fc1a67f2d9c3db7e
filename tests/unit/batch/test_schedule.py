"""The schedule: reference vectors, and its invariants on random batches."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from slime.batch.balance import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from slime.batch.schedule import MicroBatchArgs, ParallelLayout, ScheduleError, StepPlan, build_dp_schedule, plan_steps
from slime.models.cost import calculate_fwd_flops
from slime.utils.errors import ConfigError, DataError

DIMS = SimpleNamespace(
    hidden_size=16,
    num_attention_heads=2,
    num_query_groups=2,
    vocab_size=32,
    ffn_hidden_size=64,
    num_layers=2,
    kv_channels=8,
)
LENGTHS = [5, 3, 7, 2, 6, 4, 8, 1]
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10}
VECTORS = {
    "V1 dynamic": (
        LENGTHS,
        DYNAMIC,
        [[0, 1, 3, 4, 5], [2, 7, 6]],
        [[[0, 1, 2], [3, 4]], [[0, 1], [2]]],
    ),
    "V2 balance_data": (
        LENGTHS,
        {**DYNAMIC, "balance_data": True},
        [[2, 7, 4, 5], [0, 1, 3, 6]],
        [[[0, 1], [2, 3]], [[0, 1, 2], [3]]],
    ),
    "V3 balance_by_flops": (
        LENGTHS,
        {**DYNAMIC, "balance_data": True, "balance_by_flops": True},
        [[6, 7, 0, 5], [2, 3, 1, 4]],
        [[[0, 1], [2, 3]], [[0, 1], [2, 3]]],
    ),
    "V4 static": (
        LENGTHS,
        {"micro_batch_size": 2},
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[[0, 1], [2, 3]], [[0, 1], [2, 3]]],
    ),
    "V5 oversized sample": (
        [15] + [3] * 7,
        DYNAMIC,
        [[0, 4, 5, 6], [1, 2, 3, 7]],
        [[[0], [1, 2, 3]], [[0, 1, 2], [3]]],
    ),
    "V7 static balanced": (
        [1, 2, 3, 4, 5, 7, 9, 10],
        {"micro_batch_size": 1, "balance_data": True},
        [[1, 2, 5, 6], [0, 3, 4, 7]],
        [[[0], [1], [2], [3]], [[0], [1], [2], [3]]],
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_public_schedule_gives_the_reference_vectors(name):
    lengths, settings, partitions, micro_batches = VECTORS[name]
    defaults = {
        "micro_batch_size": 1,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
    }
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    out = build_dp_schedule(
        SimpleNamespace(**vars(DIMS), **{**defaults, **settings}),
        config,
        lengths,
        global_batch_size=8,
        rollout_indices=list(range(8)),
    )
    assert out == (partitions, micro_batches, [len(micro_batches[0])], [8])


def random_batch(rng: random.Random, gbs: int, steps: int, fan_out: int) -> tuple[list[int], list[int]]:
    lengths, ids = [], []
    for rollout in range(gbs * steps + rng.randrange(gbs)):
        for _ in range(rng.randint(1, fan_out)):
            lengths.append(rng.choice([1, 5, 20, 100, rng.randint(1, 300)]))
            ids.append(1000 - rollout)  # ids are names, not positions
    order = list(range(len(ids)))
    return [lengths[i] for i in order], [ids[i] for i in order]


@pytest.mark.parametrize("seed", range(200))
def test_every_dynamic_schedule_keeps_its_promises(seed):
    rng = random.Random(seed)
    dp, cp, vpp, group = rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2])
    layout = ParallelLayout(dp, cp, vpp, group)
    gbs, steps = rng.choice([8, 16]), rng.randint(1, 3)
    fan_out = rng.choice([1, 3])
    lengths, ids = random_batch(rng, gbs, steps, fan_out)
    settings = MicroBatchArgs(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=rng.choice([10, 150, 400]),
        balance_data=rng.random() < 0.5,
        balance_by_flops=rng.random() < 0.5,
    )
    try:
        plan = plan_steps(lengths, ids, global_batch_size=gbs, layout=layout, settings=settings, dims=DIMS)
    except ScheduleError:
        # the one excuse: a step whose samples mostly need a micro-batch each, in a number the ranks cannot share
        names = list(dict.fromkeys(ids))
        sizes = [sum(i in names[s : s + gbs] for i in ids) for s in range(0, len(names) - gbs + 1, gbs)]
        assert any(size % layout.microbatch_multiple for size in sizes)
        assert fan_out > 1
        return
    cap = settings.max_tokens_per_gpu * cp
    trained: list[int] = []
    step_of_rollout: dict[int, int] = {}
    for partition, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        cursor = 0
        for step, count in enumerate(plan.num_microbatches):
            for items in micro_batches[cursor : cursor + count]:
                positions = [partition[i] for i in items]
                trained += positions
                assert len(positions) == 1 or sum(lengths[p] for p in positions) <= cap
                for p in positions:
                    assert step_of_rollout.setdefault(ids[p], step) == step
            cursor += count
        assert cursor == len(micro_batches)
        assert [i for items in micro_batches for i in items] == list(range(len(partition)))
    assert len(trained) == len(set(trained))
    kept = list(dict.fromkeys(ids))[: gbs * plan.num_steps]
    assert sorted(trained) == [p for p, i in enumerate(ids) if i in set(kept)]
    assert plan.num_steps == len(set(ids)) // gbs
    assert plan.num_dropped_samples == len(ids) - len(trained)
    assert plan.num_dropped_rollouts == len(set(ids)) - len(kept)
    assert all(count % (group if vpp > 1 else 1) == 0 for count in plan.num_microbatches)


def spread(loads: list[int]) -> int:
    return max(loads) - min(loads)


def test_balance_data_brings_the_compute_of_the_ranks_closer():
    rng = random.Random(0)
    improved = 0
    for _ in range(20):
        lengths = [rng.randint(1, 500) for _ in range(32)]
        loads = []
        for balance in (False, True):
            settings = MicroBatchArgs(micro_batch_size=1, balance_data=balance)
            plan = plan_steps(
                lengths,
                range(32),
                global_batch_size=32,
                layout=ParallelLayout(4),
                settings=settings,
                dims=DIMS,
            )
            loads.append([calculate_fwd_flops([lengths[p] for p in part], DIMS) for part in plan.partitions])
        assert sum(loads[0]) == sum(loads[1])
        improved += spread(loads[1]) < spread(loads[0]) / 2
    assert improved == 20


def test_context_parallel_ranks_share_the_token_budget():
    plans = [
        plan_steps(
            LENGTHS,
            range(8),
            global_batch_size=8,
            layout=ParallelLayout(2, cp_size=cp),
            settings=MicroBatchArgs(use_dynamic_batch_size=True, max_tokens_per_gpu=10 // cp),
        )
        for cp in (1, 2)
    ]
    assert plans[0] == plans[1]


def test_balance_by_flops_respects_the_token_cap():
    # equal compute would pair the short samples beyond the cap: 64 tokens of short samples cost less than one of 60
    lengths = [60] + [8] * 16
    settings = MicroBatchArgs(use_dynamic_batch_size=True, max_tokens_per_gpu=64, balance_by_flops=True)
    plan = plan_steps(lengths, range(17), global_batch_size=17, layout=ParallelLayout(1), settings=settings, dims=DIMS)
    tokens = [sum(lengths[plan.partitions[0][i]] for i in items) for items in plan.micro_batch_indices[0]]
    assert max(tokens) <= 64
    assert sum(tokens) == sum(lengths)


@pytest.mark.parametrize(
    ("num", "gbs", "dp", "settings", "message"),
    [
        (3, 4, 1, {}, "num_rollouts 3 do not fill one step of --global-batch-size 4"),
        (2, 2, 4, {}, "2 samples cannot feed 4 data-parallel ranks"),
        (6, 6, 4, {}, "multiple of 4.*--use-dynamic-batch-size"),
        (
            6,
            6,
            4,
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1},
            "multiple of 4.*raise --max-tokens-per-gpu 1",
        ),
    ],
)
def test_schedules_that_cannot_work_are_data_errors_and_assertion_errors(num, gbs, dp, settings, message):
    kwargs = {"global_batch_size": gbs, "layout": ParallelLayout(dp), "settings": MicroBatchArgs(**settings)}
    with pytest.raises(DataError, match=message):
        plan_steps([1] * num, range(num), **kwargs)
    with pytest.raises(AssertionError, match=message):
        plan_steps([1] * num, range(num), **kwargs)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"use_dynamic_batch_size": True}, "--max-tokens-per-gpu"),
        ({"balance_by_flops": True}, "--use-dynamic-batch-size"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
    ],
)
def test_settings_that_contradict_each_other_name_the_flag(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        MicroBatchArgs(**settings)


def test_balancing_without_model_sizes_is_an_error():
    with pytest.raises(ConfigError, match="sizes of the model"):
        plan_steps([1], [0], global_batch_size=1, layout=ParallelLayout(1), settings=MicroBatchArgs(balance_data=True))


def test_a_layout_with_a_size_below_one_is_rejected():
    with pytest.raises(ConfigError, match="cp_size is 0"):
        ParallelLayout(2, cp_size=0)


@pytest.mark.parametrize(
    ("partitions", "indices", "broken"),
    [
        ([[0], [0]], [[[0]], [[0]]], "twice"),
        ([[0, 1], [2, 3]], [[[0, 1]], [[0], [1]]], "different numbers"),
        ([[0, 1]], [[[1, 0]]], "consecutive"),
    ],
)
def test_a_plan_that_breaks_an_invariant_cannot_be_built(partitions, indices, broken):
    with pytest.raises(AssertionError, match=broken):
        StepPlan(partitions, indices, num_microbatches=[1], global_batch_sizes=[2])


def test_flops_of_the_reference_model():
    assert calculate_fwd_flops([10], DIMS) == 180480
    assert calculate_fwd_flops([10, 20], DIMS) == calculate_fwd_flops([10], DIMS) + calculate_fwd_flops([20], DIMS)


def test_karmarkar_karp_reference_partitions():
    assert get_seqlen_balanced_partitions(LENGTHS, 3, equal_size=False) == [[2, 3, 5], [0, 4, 7], [1, 6]]
    assert get_seqlen_balanced_partitions([1, 2, 3, 4, 5, 6], 2, equal_size=True) == [[1, 3, 4], [0, 2, 5]]


@pytest.mark.parametrize("seed", range(50))
def test_partitions_cover_everything_once_with_equal_sizes_on_request(seed):
    rng = random.Random(seed)
    k, equal = rng.randint(1, 6), rng.random() < 0.5
    values = [rng.randint(0, 50) for _ in range(k * rng.randint(1, 8) + (0 if equal else rng.randint(0, 3)))]
    sets = karmarkar_karp(values, k, equal)
    assert len(sets) == k
    assert sorted(i for items in sets for i in items) == list(range(len(values)))
    if equal:
        assert {len(items) for items in sets} == {len(values) // k}
    loads = [sum(values[i] for i in items) for items in sets]
    assert spread(loads) <= (max(values) if not equal else k * max(values))


def test_partitions_that_cannot_exist_are_rejected():
    with pytest.raises(DataError, match="2 items into 3"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(DataError, match="equal size"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)


def plain_first_fit(lengths: list[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        fitting = (items for items in bins if sum(lengths[i] for i in items) + length <= cap)
        found = next(fitting, None)
        if found is None:
            bins.append([index])
        else:
            found.append(index)
    return bins


def test_first_fit_equals_the_search_through_all_bins():
    rng = random.Random(1)
    for _ in range(300):
        cap = rng.randint(1, 60)
        lengths = [rng.randint(0, 80) for _ in range(rng.randint(0, 40))]
        assert first_fit_pack(lengths, cap) == plain_first_fit(lengths, cap)


def test_first_fit_compares_a_logarithmic_number_of_bins():
    comparisons = 0

    class Counted(int):
        def __gt__(self, other: int) -> bool:
            nonlocal comparisons
            comparisons += 1
            return int(self) > other

        def __radd__(self, other: int) -> int:
            nonlocal comparisons
            comparisons += 1
            return other + int(self)

    # every item needs a new bin, so a search through all bins would take two million steps
    assert len(first_fit_pack([Counted(9) for _ in range(2000)], 10)) == 2000
    assert 0 < comparisons <= 2000 * 12


def test_first_fit_puts_oversized_items_alone():
    assert first_fit_pack([4, 12, 5, 1, 6], 10) == [[0, 2, 3], [1], [4]]


def test_splitting_takes_the_heaviest_bin_and_stops_at_singletons():
    bins = [[0, 1, 2], [3]]
    expand_bins_by_splitting(bins, 3, [3, 5, 3, 100])
    assert bins == [[1], [3], [0, 2]]
    expand_bins_by_splitting(bins, 9, [3, 5, 3, 100])
    assert sorted(map(sorted, bins)) == [[0], [1], [2], [3]]


def test_public_aliases_are_the_same_objects():
    from slime.algorithms.policy_loss import approx_kl
    from slime.utils import dp_schedule, flops_utils, ppo_utils, seqlen_balancing

    assert dp_schedule.build_dp_schedule is build_dp_schedule
    assert flops_utils.calculate_fwd_flops is calculate_fwd_flops
    assert ppo_utils.compute_approx_kl is approx_kl
    assert seqlen_balancing.karmarkar_karp is karmarkar_karp
