"""Multi-token prediction learns the same on every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.comparison import NASTY, PLAIN, Result, assert_equal, assert_replicas_agree, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch

Train = Callable[..., list[Result]]
# Per token: the other mode takes the mean over a micro-batch, which depends on how samples are packed
_MTP = {"mtp_num_layers": 1, "enable_mtp_training": True, "calculate_per_token_loss": True}


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Train:
    directory = tmp_path_factory.mktemp("mtp")
    make_family_checkpoint("mimo", directory / "untied", num_hidden_layers=4)
    make_family_checkpoint("mimo", directory / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    batch = make_batch(16, seed=1, lengths=NASTY)
    references: dict[str, list[Result]] = {}

    def run(model: str, world_size: int, layout: str) -> list[Result]:
        if world_size == 1 and model in references:
            return references[model]
        settings: dict[str, Any] = PLAIN | _MTP | layout_args(layout) | {"output_dir": str(directory)}
        case = {"hf": str(directory / model), "batch": batch, "num_steps": 2, "args": settings, "size": 2}
        results = ranks.run("tests.dist.layout_cases:train", world_size, **case)
        if world_size == 1:
            references[model] = results
        return results

    return run


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("untied", ""),
        ("untied", "tp2"),
        ("untied", "tp2 sp"),
        ("untied", "cp2"),
        ("untied", "pp2 vpp2"),
        ("tied", "pp2"),
    ],
)
def test_prediction_layers_learn_the_same_on_every_layout(model: str, layout: str, train: Train) -> None:
    reference = main_rank(train(model, 1, ""))
    results = train(model, 2, layout)
    assert_equal(reference, results)
    assert_replicas_agree(results)
    learnt = [name for name in reference["gradients"] if ".mtp_layers." in name]
    assert learnt
    assert all(torch.any(reference["gradients"][name] != 0) for name in learnt)
