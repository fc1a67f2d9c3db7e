"""One file adds a model family: the plan, the checks, training and the docs know it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime.config.plan.shape import read_shape
from slime.models import families as package
from slime.models.cost import num_parameters
from slime.models.family import families, why_not_built
from tests.unit.megatron_utils.command_lines import problems_of
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, single_rank

TOY = """
from slime.models.family import Family
from slime.models.family import ATTENTION, DENSE_MLP, EMBEDDINGS

CHANGED = []


def note_layer(layer, config):
    CHANGED.append(layer.module.__name__)


TOY = Family(
    model_type="toy",
    models="Toy-1B",
    particulars="layers of Llama, noted by a function of the same file",
    rules=EMBEDDINGS + ATTENTION + DENSE_MLP,
    special_layers=(f"{__name__}:note_layer",),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of the family."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    families.cache_clear()
    model = tmp_path / "model"
    make_hf_model("llama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "toy", "architectures": ["ToyForCausalLM"]}))
    yield model
    families.cache_clear()
    sys.modules.pop(f"{package.__name__}.toy", None)


def test_the_plan_the_checks_and_the_docs_know_a_new_family(toy: Path) -> None:
    from tools.make_model_pages import family_table

    assert why_not_built("toy") is None
    shape = read_shape(Namespace(hf_checkpoint=str(toy)))
    llama = read_shape(Namespace(hf_checkpoint=str(toy), num_layers=1))
    assert shape.model_type == "toy"
    assert num_parameters(shape) > num_parameters(llama)
    assert problems_of(str(toy), []) == []
    (problem,) = problems_of(str(toy), ["--num-layers", "5"])
    assert problem.startswith("--num-layers 5 differs from num_hidden_layers 2")
    assert "| `toy` | Toy-1B | layers of Llama, noted by a function of the same file |" in family_table()


def test_a_new_family_trains_with_its_special_layers(toy: Path) -> None:
    from slime.backends.megatron_utils.actor import MegatronTrainer

    with single_rank():
        trainer = MegatronTrainer(make_args(toy, lr=1e-3), rank=0, world_size=1, with_ref=False)
        trainer.setup()
        before = {name: value.clone() for name, value in trainer.export_weights()}
        assert "model.layers.1.mlp.gate_proj.weight" in before
        (step,) = trainer.train(0, make_batch()).steps
        assert step["grad_norm"] > 0
        assert any(not torch.equal(value, before[name]) for name, value in trainer.export_weights())
    assert sys.modules[f"{package.__name__}.toy"].CHANGED


def test_two_families_with_one_name_are_an_error(toy: Path) -> None:
    (toy.parent / "second.py").write_text(TOY)
    families.cache_clear()
    with pytest.raises(ValueError, match="model_type toy has two families"):
        families()
    sys.modules.pop(f"{package.__name__}.second")
