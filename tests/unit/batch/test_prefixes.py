"""Shared prefixes: the tree of a batch, and packing and scheduling with it, against plain loops."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import numpy
import pytest
import torch

from slime.batch import prefixes
from slime.batch.packing import pack, rows_of_samples
from slime.batch.prefixes import PrefixTree, prefix_tree
from slime.batch.schedule import MicroBatchArgs, ParallelLayout, plan_steps
from slime.batch.ship import split_by_dp
from slime.models.cost import flops_of_length
from tests.unit.batch.test_schedule import DIMS


def _samples(rng: random.Random, number: int) -> list[list[int]]:
    """Sequences of 2 to 13 tokens that often continue a beginning of an earlier one, or repeat it."""
    samples: list[list[int]] = []
    for _ in range(number):
        start = rng.choice(samples)[: rng.randint(0, 10)] if samples and rng.random() < 0.7 else []
        samples.append(start + [rng.randint(0, 3) for _ in range(rng.randint(0 if len(start) > 1 else 2, 3))])
    return samples


def _unique(samples: list[list[int]]) -> int:
    return len({tuple(sample[:end]) for sample in samples for end in range(1, len(sample) + 1)})


@pytest.mark.parametrize("blocks", [(64, 4096), (1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_of_any_subset_are_counted_as_a_set_of_beginnings_would(seed, blocks, monkeypatch):
    monkeypatch.setattr(prefixes, "_FIRST_BLOCK", blocks[0])
    monkeypatch.setattr(prefixes, "_LARGEST_BLOCK", blocks[1])
    rng = random.Random(seed)
    samples = _samples(rng, 12)
    tree = PrefixTree(samples)
    for _ in range(10):
        some = rng.sample(range(12), rng.randint(1, 12))
        ordered, shared = tree.arrange(some)
        assert sorted(ordered) == sorted(some)
        assert tree.cost(some) == _unique([samples[i] for i in some])
        for (one, other), length in zip(itertools.pairwise(ordered), shared[1:], strict=True):
            pairs = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(samples[one], samples[other], strict=False)
            )
            assert len(list(pairs)) == length
        # the first token of a beginning pays what a sequence of that length costs more than one without it
        by_depth = {
            tuple(samples[i][:end]): end**2 - (end - 1) ** 2 for i in some for end in range(1, len(samples[i]) + 1)
        }
        assert tree.cost(some, lambda length: length**2) == sum(by_depth.values())


def test_tokens_that_the_engine_sent_to_other_experts_are_other_tokens():
    tokens = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]]
    routes = torch.zeros(3, 3, 2, 2, dtype=torch.uint8)
    routes[1, 1, 1, 0] = 1  # the second token of the second sample
    assert PrefixTree(tokens).cost([0, 1, 2]) == 5
    tree = PrefixTree(tokens, list(routes))
    assert tree.cost([0, 1]) == 4 + 3
    assert tree.cost([0, 2]) == 4
    assert prefix_tree({"tokens": tokens, "rollout_routed_experts": list(routes)}).cost([0, 1, 2]) == 7


def test_experts_of_any_number_of_bytes_are_told_apart():
    tokens = [[5, 6], [5, 7], [5]]
    for dtype, topk in ((torch.uint8, 1), (torch.uint8, 3), (torch.int16, 1), (torch.int16, 4), (torch.int32, 1)):
        routes = [torch.zeros(1, 1, topk, dtype=dtype), torch.zeros(1, 1, topk, dtype=dtype), torch.zeros(0, 1, topk)]
        routes[2] = routes[2].to(dtype)  # a sample of one token has no record
        tree = PrefixTree(tokens, routes)
        assert [tree.cost([0, 1]), tree.cost([0, 2])] == [3, 3], "experts 0 are not those of a token without a record"
        routes[1][0, 0, -1] = 1
        assert PrefixTree(tokens, routes).cost([0, 1]) == 4


def test_a_tree_keeps_no_tokens():
    tokens = [numpy.arange(100), numpy.arange(100)]
    kept = [weakref.ref(one) for one in tokens]
    tree = PrefixTree(tokens)
    del tokens
    gc.collect()
    assert [one() for one in kept] == [None, None]
    assert tree.cost([0, 1]) == 100


def test_sorting_reads_each_sample_up_to_its_first_difference(monkeypatch):
    """Not the rest of it, and nothing again for each comparison of a sort."""
    read = 0

    class Counting(numpy.ndarray):
        def tobytes(self, *args):
            nonlocal read
            read += len(self)
            return super().tobytes(*args)

    length, number = 10_000, 200
    rows = [numpy.full((length, 1), 7, dtype=numpy.int64) for _ in range(number)]
    for index, row in enumerate(rows):
        row[100] = index  # the others are equal for longer than one block
    assert sorted(prefixes._sorted([row.view(Counting) for row in rows])) == list(range(number))
    assert 100 * number < read <= 4 * 100 * number


def test_a_batch_with_images_shares_nothing():
    assert prefix_tree({"tokens": [[1, 2]], "multimodal_train_inputs": [None]}) is not None
    assert prefix_tree({"tokens": [[1, 2]], "multimodal_train_inputs": [{"pixel_values": 1}]}) is None


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_packed_rows_positions_and_targets_are_those_of_every_sample(seed, joins):
    rng = random.Random(seed)
    samples = _samples(rng, 8)
    ordered, shared = PrefixTree(samples).arrange(range(8))
    tokens = [torch.tensor(samples[i]) for i in ordered]
    responses = [rng.randint(0, len(one) - 1) for one in tokens]
    multiple = rng.choice([1, 7, 64])
    packed = pack(tokens, responses, pad_multiple=multiple, shared=shared, joins_targets=joins)

    unique = _unique(samples)
    assert packed.tokens.shape[1] == unique + -unique % multiple
    pairs = packed.response_pairs if joins else torch.arange(sum(responses))
    if joins:
        both = list(zip(packed.response_rows.tolist(), packed.response_targets.tolist(), strict=True))
        assert len(set(both)) == len(both)
    holders = torch.zeros_like(packed.num_holders[0])
    begin = 0
    for sample, response, spans in zip(tokens, responses, rows_of_samples(packed.borders, shared), strict=True):
        rows = torch.cat([torch.arange(first, first + length) for first, length in spans])
        holders[rows] += 1
        assert torch.equal(packed.tokens[0, rows], sample)
        assert torch.equal(packed.position_ids[0, rows], torch.arange(len(sample)))
        mine = pairs[begin : begin + response]
        assert torch.equal(packed.response_rows[mine], rows[len(rows) - response - 1 : -1])
        assert torch.equal(packed.response_targets[mine], sample[len(rows) - response :])
        begin += response
    assert torch.equal(holders, packed.num_holders[0])
    assert int((holders == 0).sum()) == -unique % multiple
    assert packed.max_seqlen > int(packed.position_ids.max())


@pytest.mark.parametrize("balances", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_schedule_packs_by_tokens_that_pass_the_model(seed, balances):
    rng = random.Random(seed)
    samples = _samples(rng, 24)
    settings = MicroBatchArgs(
        use_dynamic_batch_size=True, max_tokens_per_gpu=30, share_prefixes=True, balance_by_flops=balances
    )
    tree = PrefixTree(samples)
    lengths = list(map(len, samples))
    plan = plan_steps(
        lengths, range(24), global_batch_size=12, layout=ParallelLayout(2), settings=settings, dims=DIMS, prefixes=tree
    )
    assert sorted(position for part in plan.partitions for position in part) == list(range(24))
    for part, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        for items in micro_batches:
            assert tree.cost([part[i] for i in items]) <= 30


def test_a_group_stays_together_and_a_system_prompt_does_not_decide():
    system, groups = [0] * 20, [[1] * 200, [2] * 200, [3] * 200]
    samples = [system + prompt + [9, index] * 10 for index in range(4) for prompt in groups]
    tree = PrefixTree(samples)
    units = tree.units(range(12), 400)
    assert [sorted(i % 3 for i in unit) for unit in units] == [[group] * 4 for group in range(3)]
    assert tree.pack(range(12), 400) == units  # two groups would be 580 tokens
    assert len(tree.pack(range(12), 600)) == 2
    # a group above the limit is cut, and its parts pay for the prompt
    assert [tree.cost(unit) for unit in tree.units(range(0, 12, 3), 270)] == [259, 259]
    bins = tree.pack(range(12), 1000)
    tree.expand(bins, 6)
    assert sorted(len(items) for items in bins) == [2] * 6
    tree.expand(bins, 99)
    assert len(bins) == 12


def test_the_shipment_counts_what_passes_the_model():
    data = {
        "tokens": [[1, 2, 3, 4], [1, 2, 3, 5], [7, 8], [1, 2, 3, 4]],
        "total_lengths": [4, 4, 2, 4],
        "response_lengths": [1] * 4,
        "loss_masks": [[1]] * 4,
        "rollout_ids": [0, 1, 2, 3],
    }
    settings = MicroBatchArgs(micro_batch_size=2, share_prefixes=True)
    shipment = split_by_dp(data, layout=ParallelLayout(1), global_batch_size=4, settings=settings)
    assert shipment.cost() == 5 + 6
    flops = flops_of_length(DIMS)
    assert shipment.cost(flops) == 2 * flops(4) - flops(3) + flops(2) + flops(4)
    settings = MicroBatchArgs(micro_batch_size=2)
    assert split_by_dp(data, layout=ParallelLayout(1), global_batch_size=4, settings=settings).cost() is None
