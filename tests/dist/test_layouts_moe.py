"""Experts and latent attention: expert parallelism, alone and with the other kinds, trains like one rank."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import (
    NASTY,
    PLAIN,
    ComparisonTable,
    Result,
    Train,
    assert_equal,
    assert_replicas_agree,
    layout_args,
    main_rank,
    trainer,
)
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch, with_shared_prefixes
from tools.convert_hf_to_int4_direct import _IGNORED, convert


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Train:
    directory = tmp_path_factory.mktemp("layouts_moe")
    batch = make_batch(16, seed=1, lengths=NASTY)
    of_family = trainer(ranks, directory, batch, make_family_checkpoint)
    of_repeats = trainer(ranks, directory, with_shared_prefixes(batch), make_family_checkpoint)

    def run(family: str, world_size: int, layout: str, **arguments: Any) -> list[Result]:
        if "int4_group_size" in arguments:
            if not (directory / family).exists():
                make_family_checkpoint(family, directory / family)
            family = _in_int4(directory, family, arguments["int4_group_size"])
        of_batch = of_repeats if arguments.pop("repeats", False) else of_family
        return of_batch(family, world_size, layout, **arguments)

    return run


def _in_int4(directory: Path, family: str, group_size: int) -> str:
    name = f"{family}_int4"
    if not (directory / name).exists():
        places = {"model_dir": str(directory / family), "save_dir": str(directory / name)}
        convert(Namespace(**places, group_size=group_size, ignore_rules=_IGNORED, max_workers=1))
    return name


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        ("qwen3_moe", 2, ""),
        ("qwen3_moe", 2, "ep2"),
        ("qwen3_moe", 2, "ep2 distopt"),
        ("qwen3_moe", 4, "ep4 cp2 size1"),
        ("qwen3_moe", 2, "tp2 sp ep2 etp1"),
        ("qwen3_moe", 4, "tp2 sp ep2"),  # each expert is cut in two
        ("qwen3_moe", 4, "pp2 first1 ep2"),  # and stages of one and two layers
        ("deepseek_v3", 2, "tp2 sp ep2 etp1"),
        ("deepseek_v3", 4, "pp2 first1 ep2 distopt"),
        ("deepseek_v3", 8, "tp2 sp ep2 cp2 pp2 first1"),
        ("glm4_moe_qk_norm", 2, "tp2 sp ep2 etp1"),
        ("qwen3_next", 4, "tp2 sp ep2 cp2"),  # the delta nets' ranks exchange tokens for heads
        ("qwen3_5_moe", 4, "pp2 first1 cp2"),
        ("minimax_m2", 2, "tp2 sp ep2 etp1"),  # the norms' mean of squares is over both tensor ranks
        ("glm_moe_dsa", 4, "tp2 sp ep2 cp2"),
        ("deepseek_v32", 4, "pp2 first1 cp2"),
    ],
)
def test_a_model_with_experts_trains_like_on_one_rank(
    family: str, world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    results = train(family, world_size, layout)
    table.add(world_size, f"{layout} {family}", assert_equal(main_rank(train(family, 1, "size16")), results))
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    ("family", "world_size", "layout", "reads"),
    [
        ("qwen3_moe", 2, "", 0),
        ("qwen3_moe", 2, "ep2", 1),
        ("deepseek_v3", 2, "tp2 sp", 1),  # each expert is cut in two
        ("qwen3_moe", 2, "tp2 sp ep2 etp1", 1),
        ("qwen3_moe", 4, "tp2 sp ep2", 1),
    ],
)
def test_a_layer_equals_megatrons_and_reads_the_sizes_of_the_exchange_once(
    family: str, world_size: int, layout: str, reads: int, ranks: ForkServer, tmp_path: Path
) -> None:
    make_family_checkpoint(family, tmp_path / "hf")
    args = PLAIN | layout_args(layout) | {"output_dir": str(tmp_path)}
    case = {"hf": str(tmp_path / "hf"), "args": args}
    for result in ranks.run("tests.dist.layout_cases:experts_beside_megatrons", world_size, **case):
        assert result["reads"] == (reads, 0)
        for pair in (result["values"], result["places"]):
            expected, found = pair
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=str(name))


@pytest.mark.parametrize("layout", ["ep2", "tp2 sp"])  # the latter: groups of the second product on two ranks
def test_experts_that_compute_in_fake_int4_train_like_on_one_rank(
    layout: str, train: Train, table: ComparisonTable
) -> None:
    # weights that move round to another neighbor on one layout than on another, by chance
    settings = {"int4_group_size": 4, "lr": 0.0}
    one = main_rank(train("qwen3_moe", 1, "size16", **settings))
    table.add(2, f"{layout} fake INT4", assert_equal(one, train("qwen3_moe", 2, layout, **settings)))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa"])  # the latter: a layer that shares a choice of keys
def test_recomputing_experts_changes_nothing(family: str, train: Train) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = train(family, 2, "ep2", **recompute)
    assert_equal(main_rank(train(family, 1, "size16")), results)


@pytest.mark.parametrize(
    ("world_size", "layout", "recompute"),
    [
        (2, "tp2 sp ep2 etp1", {}),
        (2, "cp2 ep2", {}),
        (
            4,
            "pp2 first1 ep2",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
    ],
    ids=["tp2-sp-ep2", "cp2-ep2", "pp2-ep2-recompute"],
)
def test_replayed_routes_belong_to_the_same_tokens_on_any_layout(
    world_size: int, layout: str, recompute: dict[str, Any], train: Train, table: ComparisonTable
) -> None:
    """The first step is large enough that the second would choose other experts, were the choices not replayed."""
    replayed = {"use_routing_replay": True, "lr": 3e-3}
    reference = main_rank(train("qwen3_moe", 1, "size16", **replayed))
    free = main_rank(train("qwen3_moe", 1, "size16", lr=3e-3))
    assert reference["report"].steps[1]["loss"] != free["report"].steps[1]["loss"]
    results = train("qwen3_moe", world_size, layout, **replayed, **recompute)
    table.add(world_size, f"{layout} replay", assert_equal(reference, results, weight_tolerance=3e-4))


_BALANCED = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.5]}
_BIASED = {"moe_router_bias_update_rate": 0.1}


@pytest.mark.parametrize(
    ("family", "world_size", "layout", "settings"),
    [
        ("qwen3", 1, "", {}),
        ("qwen3_moe", 1, "", _BALANCED),
        ("qwen3_moe", 2, "tp2 sp ep2 etp1", _BALANCED),
        ("deepseek_v3", 1, "", _BIASED),
        ("deepseek_v3", 4, "pp2 first1 cp2", _BIASED),
        ("qwen3_next", 1, "", {}),
        ("glm_moe_dsa", 1, "", {}),
    ],
)
def test_padding_of_micro_batches_changes_nothing(
    family: str, world_size: int, layout: str, settings: dict[str, Any], train: Train
) -> None:
    """Neither losses and gradients nor the load of experts, which a loss or a bias balances."""
    # the same micro-batches on every layout: the loss of the load is not linear in them
    reference = main_rank(train(family, 1, "", **settings))
    results = train(family, world_size, layout, **settings, data_pad_size_multiplier=48)
    assert_equal(reference, results)
    assert_replicas_agree(results)
    if settings:  # it is large enough to show
        free = main_rank(train(family, 1, ""))
        assert any(not free["weights"][name].equal(weight) for name, weight in reference["weights"].items())


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [("qwen3_moe", "tp2 sp ep2 etp1", _BALANCED), ("deepseek_v3", "pp2 first1", _BIASED)],
)
def test_a_shared_prefix_counts_for_the_load_of_experts_as_often_as_samples_have_it(
    family: str, layout: str, settings: dict[str, Any], train: Train
) -> None:
    reference = main_rank(train(family, 1, "size8", repeats=True, **settings))
    results = train(family, 2, f"{layout} size8", repeats=True, share_prefixes=True, **settings)
    assert_equal(reference, results)
    assert_replicas_agree(results)
