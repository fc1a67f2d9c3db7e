"""A layout changes no number: every combination of parallel sizes trains like one rank with one micro-batch per step.

The numbers of ``docs/parallelism.md`` refer to the items of the invariance contract there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import (
    NASTY,
    PLAIN,
    ComparisonTable,
    Result,
    assert_equal,
    assert_replicas_agree,
    layout_args,
    main_rank,
)
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model, with_sampling_sets, with_shared_prefixes

Train = Callable[..., list[Result]]

_STEPS = 2


def _depth(layout: str) -> int:
    """Layers of the model: as few as the layout cuts into stages."""
    return 4 if "vpp" in layout or "pp4" in layout else 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for depth in (2, 4):
        make_hf_model("qwen3", path / f"tied{depth}", num_hidden_layers=depth, tie_word_embeddings=True)
        make_hf_model("llama3", path / f"untied{depth}", num_hidden_layers=depth, tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def train(ranks: ForkServer, directory: Path) -> Train:
    """``train(world_size, layout, **arguments)``: what each rank saw. The reference is remembered."""
    batch = make_batch(16, seed=1, lengths=NASTY)
    known: dict[str, list[Result]] = {}

    def run(world_size: int, layout: str, *, model: str = "tied", depth: int = 0, **arguments: Any) -> list[Result]:
        model += str(depth or _depth(layout))
        settings = PLAIN | layout_args(layout) | {"output_dir": str(directory)} | arguments
        size = settings.pop("size", 3)
        key = f"{world_size}{model}{size}{settings}"
        samples = with_shared_prefixes(batch) if settings.pop("repeats", False) else batch
        if key not in known:
            known[key] = ranks.run(
                "tests.dist.layout_cases:train",
                world_size,
                hf=str(directory / model),
                batch=with_sampling_sets(samples) if "rollout_top_p" in settings else samples,
                num_steps=_STEPS,
                args=settings,
                size=size,
            )
        return known[key]

    return run


def one_rank(train: Train, layout: str, **arguments: Any) -> Result:
    """One rank with one micro-batch per step, on the model of ``layout``."""
    return main_rank(train(1, "size16 token" if "token" in layout else "size16", depth=_depth(layout), **arguments))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (1, "size1"),
        (2, ""),
        (2, "distopt"),
        (2, "tp2"),
        (2, "tp2 sp"),
        (4, "tp4 sp"),  # more ranks than groups of key/value heads
        (2, "cp2"),
        (4, "cp4 size1"),
        (2, "pp2"),
        (2, "pp2 vpp2 size2"),
    ],
)
def test_one_kind_of_parallelism_trains_like_one_rank(
    world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    results = train(world_size, layout)
    table.add(world_size, layout, assert_equal(one_rank(train, layout), results))
    assert_replicas_agree(results)


@pytest.mark.parametrize(("world_size", "layout"), [(4, "tp2 sp size8"), (2, "pp2 vpp2 size2")])
def test_shared_prefixes_train_like_separate_samples(
    world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    results = train(world_size, layout, repeats=True, share_prefixes=True)
    reference = one_rank(train, layout, repeats=True)
    table.add(world_size, f"{layout} shared prefixes", assert_equal(reference, results))
    assert_replicas_agree(results)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "tp2 sp"), (2, "pp2 vpp2 size2")])
def test_so_does_a_model_with_a_head_of_its_own_and_scaled_rope(
    world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    results = train(world_size, layout, model="untied")
    largest = assert_equal(one_rank(train, layout, model="untied"), results)
    table.add(world_size, f"{layout} untied", largest)
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "tp2 sp token"),
        (4, "cp4 token"),
        (4, "pp2 cp2 distopt token"),
    ],
)
def test_the_mean_over_tokens_is_as_independent_of_the_layout(
    world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    table.add(world_size, layout, assert_equal(one_rank(train, layout), train(world_size, layout)))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "tp2 pp2"),
        (4, "tp2 cp2"),
        (4, "tp2 sp cp2"),
        (4, "pp2 cp2 size1"),
        (4, "tp2 sp distopt"),
        (4, "pp4"),
        (4, "pp2 mapped"),
        (8, "tp2 sp pp2 cp2"),
        (8, "pp2 cp2 distopt"),
        (8, "tp2 sp pp2 vpp2 distopt size1"),
    ],
)
def test_combinations_train_like_one_rank(world_size: int, layout: str, train: Train, table: ComparisonTable) -> None:
    results = train(world_size, layout)
    table.add(world_size, layout, assert_equal(one_rank(train, layout), results))
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    "objective",
    [
        {"advantage_estimator": "gspo", "eps_clip": 1e-3},
        {
            "advantage_estimator": "reinforce_plus_plus",
            "normalize_advantages": True,
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "kl_coef": 0.1,
        },
        {"use_tis": True, "use_opsm": True, "opsm_delta": 1e-3, "entropy_coef": 0.01},
    ],
    ids=["gspo", "reinforce_plus_plus", "tis_opsm_entropy"],
)
def test_objectives_over_whole_sequences_do_not_see_context_parallelism(
    objective: dict[str, Any], train: Train, table: ComparisonTable, request: pytest.FixtureRequest
) -> None:
    results = train(4, "cp2", **objective)
    largest = assert_equal(one_rank(train, "", **objective), results)
    table.add(4, f"cp2 {request.node.callspec.id}", largest)
    assert_replicas_agree(results)


_BUILT_IN = "slime.backends.megatron_utils.loss.policy_loss_function"
_USER = "tests/unit/megatron_utils/user_objectives.py"


@pytest.mark.parametrize("layout", ["tp2 sp cp2", "pp2 cp2 size1 token"])
def test_a_users_loss_that_is_the_builtin_one_trains_like_it_on_any_layout(
    layout: str, train: Train, table: ComparisonTable
) -> None:
    results = train(4, layout, loss_type="custom_loss", custom_loss_function_path=_BUILT_IN)
    table.add(4, f"{layout} custom_loss", assert_equal(one_rank(train, layout), results))
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    "objective",
    [
        {"advantage_estimator": "gspo", "eps_clip": 1e-3},
        {"use_tis": True, "use_opsm": True, "opsm_delta": 1e-3, "entropy_coef": 0.01},
        {"rollout_top_p": 0.9, "entropy_coef": 0.01, "recompute_loss_function": True},
        {"custom_pg_loss_reducer_function_path": f"{_USER}:token_sum"},
        {"custom_advantage_function_path": f"{_USER}:same_advantages", "use_tis": True}
        | {"custom_tis_function_path": f"{_USER}:tis_of_gathered_parts"},
    ],
    ids=["gspo", "tis_opsm_entropy", "top_p", "reducer", "tis_function"],
)
def test_so_does_every_objective_under_context_parallelism(objective: dict[str, Any], train: Train) -> None:
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": _BUILT_IN}
    assert_equal(one_rank(train, "", **objective), train(2, "cp2", **objective, **custom))


@pytest.mark.parametrize(("world_size", "layout"), [(2, "pp2 vpp2 size2"), (2, "tp2 sp")])
def test_layers_of_a_users_spec_train_like_those_of_the_family(world_size: int, layout: str, train: Train) -> None:
    spec = ["tests/unit/megatron_utils/user_specs.py:layer"]
    assert_equal(one_rank(train, layout), train(world_size, layout, spec=spec))


@pytest.mark.parametrize("layout", ["cp2", "cp2 token"])
def test_a_loss_over_sequences_that_gathers_and_cuts_is_the_builtin_one(layout: str, train: Train) -> None:
    objective = {"advantage_estimator": "gspo", "eps_clip": 1e-3, "use_kl_loss": False, "kl_loss_coef": 0.0}
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{_USER}:sequence_loss"}
    builtin = one_rank(train, layout, **objective)
    written = main_rank(train(2, layout, **objective, **custom))
    for ours, theirs in zip(written["report"].steps, builtin["report"].steps, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["mine"] == pytest.approx(theirs["pg_loss"], rel=1e-4, abs=1e-6)
    for name, gradient in builtin["gradients"].items():
        torch.testing.assert_close(written["gradients"][name], gradient, atol=3e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("layout", ["", "cp2"])
def test_a_loss_may_return_a_metric_on_some_ranks_and_micro_batches_only(layout: str, train: Train) -> None:
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{_USER}:loss_with_a_metric_of_one_rank"}
    builtin, written = one_rank(train, layout), main_rank(train(2, layout, **custom))
    for ours, theirs in zip(written["report"].steps, builtin["report"].steps, strict=True):
        assert ours["pg_loss"] == pytest.approx(theirs["pg_loss"], rel=1e-4, abs=1e-6)
        assert ours["num_groups"] > 0


@pytest.mark.parametrize("custom", [{}, {"loss_type": "custom_loss", "custom_loss_function_path": _BUILT_IN}], ids=str)
def test_a_reducer_that_cuts_masks_for_its_rank_reduces_the_same(custom: dict[str, str], train: Train) -> None:
    plain = {"custom_pg_loss_reducer_function_path": f"{_USER}:token_sum"}
    cutting = {"custom_pg_loss_reducer_function_path": f"{_USER}:token_sum_of_parts"}
    assert_equal(one_rank(train, "", **plain), train(2, "cp2", **cutting, **custom))


@pytest.mark.parametrize(
    ("world_size", "layout", "recompute"),
    [
        (4, "tp2 sp pp2", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (4, "cp2 pp2 vpp2 size2", {"recompute_granularity": "selective"}),
    ],
)
def test_recomputing_activations_changes_nothing_on_any_layout(
    world_size: int, layout: str, recompute: dict[str, Any], train: Train, table: ComparisonTable
) -> None:
    largest = assert_equal(one_rank(train, layout), train(world_size, layout, **recompute))
    table.add(world_size, f"{layout} recompute-{recompute['recompute_granularity']}", largest)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "distopt"), (2, "pp2"), (4, "tp2 sp cp2")])
def test_in_bf16_the_first_step_differs_by_rounding_only(world_size: int, layout: str, train: Train) -> None:
    bf16 = {"fp32": False, "bf16": True}
    reference, results = one_rank(train, layout, **bf16), train(world_size, layout, **bf16)
    main = main_rank(results)
    for result in results:
        for position, values in result["log_probs"].items():
            torch.testing.assert_close(values, reference["log_probs"][position], atol=0.06, rtol=0)
    ours, theirs = main["report"].steps[0], reference["report"].steps[0]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
    for name, gradient in main["gradients"].items():
        error = (gradient - reference["gradients"][name]).norm() / reference["gradients"][name].norm()
        assert error < 0.05, (name, error)
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "tp2"), (2, "tp2 sp"), (4, "cp2"), (2, "pp2"), (8, "tp2 sp cp2 pp2 distopt")]
)
def test_a_critic_says_and_learns_the_same_values(
    world_size: int, layout: str, ranks: ForkServer, directory: Path
) -> None:
    def run(world_size: int, layout: str) -> list[dict[str, Any]]:
        settings = {"advantage_estimator": "ppo", "global_batch_size": 8, "lr": 1e-3, "gamma": 0.9} | layout_args(
            layout
        )
        return ranks.run(
            "tests.dist.layout_cases:train_critic",
            world_size,
            hf=str(directory / "tied2"),
            batch=make_batch(16, seed=1, lengths=NASTY),
            num_steps=_STEPS,
            args=settings | {"output_dir": str(directory)},
            size=settings.pop("size", 3),
        )

    (reference,) = run(1, "size16")
    results = run(world_size, layout)
    (steps,) = [result["steps"] for result in results if result["steps"]]
    for ours, theirs in zip(steps, reference["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for result in results:
        for ours, theirs in zip(result["values"], reference["values"], strict=True):
            for position, value in ours.items():
                torch.testing.assert_close(value, theirs[position], atol=1e-5, rtol=1e-4)
    moved = [(a - b).abs().max() for a, b in zip(*(v.values() for v in reference["values"]), strict=True)]
    assert max(moved) > 1e-2


@pytest.mark.parametrize(("world_size", "layout"), [(2, "tp2 sp"), (4, "tp2 cp2"), (4, "pp2 cp2 size1")])
def test_what_a_token_was_sampled_from_is_replayed_on_every_layout(
    world_size: int, layout: str, train: Train, table: ComparisonTable
) -> None:
    cut = {"rollout_top_p": 0.9, "entropy_coef": 0.01}
    results = train(world_size, layout, **cut)
    largest = assert_equal(one_rank(train, layout, **cut), results)
    table.add(world_size, f"{layout} top-p", largest)
    assert_replicas_agree(results)
    whole = one_rank(train, layout)["log_probs"]
    assert all((cut >= whole[at]).all() for at, cut in main_rank(results)["log_probs"].items()), "a part has less mass"
