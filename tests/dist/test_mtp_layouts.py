"""Multi-token prediction learns the same on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.comparison import NASTY, Train, assert_equal, assert_replicas_agree, main_rank, trainer
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch

# Per token: the other mode takes the mean over a micro-batch, which depends on how samples are packed
_MTP = {"mtp_num_layers": 1, "enable_mtp_training": True, "calculate_per_token_loss": True}


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Train:
    def make(model: str, path: Path) -> None:
        head = {"tie_word_embeddings": True} if model == "tied" else {}
        make_family_checkpoint("mimo", path, num_hidden_layers=4, **head)

    batch = make_batch(16, seed=1, lengths=NASTY)
    return trainer(ranks, tmp_path_factory.mktemp("mtp"), batch, make, size=2, **_MTP)


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
