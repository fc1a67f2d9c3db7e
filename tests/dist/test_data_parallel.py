"""One rank and two ranks see the same rollouts: same losses, same weights, also across a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model
from tests.verification import verify

Results = dict[str, dict[str, Any]]


def _job(
    hf: Path, *, num_rollouts: int = 3, save_hf: str | None = None, offloads: bool = False, **overrides: Any
) -> dict[str, Any]:
    args = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "global_batch_size": 8, "lr": 1e-3}
    batches = [make_batch(16, seed=seed) for seed in range(3)]
    return {
        "hf": str(hf),
        "args": args | overrides,
        "batches": batches,
        "num_rollouts": num_rollouts,
        "num_steps": 2,
        "save_hf": save_hf,
        "offloads": offloads,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data_parallel")
    make_hf_model("qwen3", path / "hf")
    return path


def _run(ranks: ForkServer, world_size: int, jobs: dict[str, dict[str, Any]]) -> Results:
    return {
        name: ranks.run("tests.dist.data_parallel_cases:run_job", world_size, **job)[0] for name, job in jobs.items()
    }


@pytest.fixture(scope="module")
def two(ranks: ForkServer, directory: Path) -> Results:
    hf, checkpoint = directory / "hf", directory / "checkpoint"
    jobs = {
        "mean": _job(hf, save_hf=str(directory / "export")),
        "token": _job(hf, calculate_per_token_loss=True),
        "offloaded": _job(hf, offloads=True),
        "first part": _job(hf, num_rollouts=2, save=str(checkpoint)),
        "second part": _job(hf, load=str(checkpoint)),
    }
    return _run(ranks, 2, jobs)


@pytest.fixture(scope="module")
def one(ranks: ForkServer, directory: Path, two: Results) -> Results:
    hf = directory / "hf"
    jobs = {
        "mean": _job(hf),
        "token": _job(hf, calculate_per_token_loss=True),
        "second part": _job(hf, load=str(directory / "checkpoint")),
    }
    return _run(ranks, 1, jobs)


def _assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["start"] == right["start"]
    for a, b in zip(left["reports"], right["reports"], strict=True):
        assert len(a.steps) == len(b.steps) == 2
        for mine, other in zip([*a.steps, a.rollout], [*b.steps, b.rollout], strict=True):
            assert mine == pytest.approx(other, rel=2e-4, abs=2e-5)
    for name, value in left["weights"].items():
        torch.testing.assert_close(right["weights"][name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["mean", "token"])
def test_two_ranks_train_like_one_on_uneven_lengths(mode: str, one: Results, two: Results, directory: Path) -> None:
    from safetensors.torch import load_file

    _assert_same(one[mode], two[mode])
    initial = load_file(directory / "hf" / "model.safetensors")
    assert max((value - two[mode]["weights"][name]).abs().max() for name, value in initial.items()) > 1e-3


def test_the_two_reductions_differ(two: Results) -> None:
    assert two["mean"]["reports"][0].steps[0]["loss"] != two["token"]["reports"][0].steps[0]["loss"]


def test_a_run_saved_by_two_ranks_continues_bit_for_bit(two: Results) -> None:
    assert two["second part"]["start"] == 2
    assert two["second part"]["reports"][0].steps == two["mean"]["reports"][2].steps
    for name, value in two["mean"]["weights"].items():
        verify(
            "weights of a resumed run, two ranks", "the uninterrupted run", two["second part"]["weights"][name], value
        )


def test_two_ranks_train_bit_for_bit_the_same_when_they_give_their_memory_back_in_between(two: Results) -> None:
    for mine, other in zip(two["offloaded"]["reports"], two["mean"]["reports"], strict=True):
        assert mine.steps == other.steps
    assert all(torch.equal(two["offloaded"]["weights"][name], value) for name, value in two["mean"]["weights"].items())


def test_a_run_saved_by_two_ranks_continues_on_one(one: Results, two: Results) -> None:
    _assert_same(two["second part"], one["second part"])


def test_an_hf_export_by_two_ranks_holds_the_trained_weights(two: Results, directory: Path) -> None:
    from safetensors.torch import load_file

    exported = load_file(directory / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in two["mean"]["weights"].items())
