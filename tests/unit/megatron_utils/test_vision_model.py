"""Models with a vision tower against ``transformers``: log-probs, gradients and weights, packed, with and without
images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.config.groups import RunConfig
from slime.utils.errors import ConfigError, DataError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch
from tests.unit.megatron_utils.tiny_vision_models import (
    IMAGE,
    START,
    VISION_KINDS,
    make_vision_batch,
    make_vision_model,
    reference_logits,
)
from tests.verification import verify

KEYS = {"image": "images"}
GRIDS = [[[1, 4, 4]], [], [[1, 4, 6], [1, 2, 2]], [[1, 6, 4]], [], [[1, 2, 8]]]
"""Grids of six samples: one image, none, two, and so on."""
VIDEOS = {1: [2, 4, 4], 3: [3, 2, 4]}


pytestmark = pytest.mark.usefixtures("trainer_rank")


def _trainer(path: Path, **settings: Any) -> Any:
    from slime.backends.megatron_utils.actor import MegatronTrainer

    trainer = MegatronTrainer(
        make_args(path, **({"multimodal_keys": KEYS} | settings)), rank=0, world_size=1, with_ref=False
    )
    trainer.setup()
    return trainer


def _expected_log_probs(model: Any, batch: dict[str, Any], index: int) -> torch.Tensor:
    tokens, length = batch["tokens"][index], batch["response_lengths"][index]
    log_probs = reference_logits(model, batch, index)[:-1].log_softmax(-1)
    return log_probs.gather(1, tokens[1:, None])[-length:, 0]


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_log_probs_of_packed_samples_with_images_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_vision_model(kind, tmp_path)
    trainer = _trainer(tmp_path)
    batch = make_vision_batch(GRIDS, videos=VIDEOS)
    ours = trainer._log_probs(trainer._train_batch(batch))
    with torch.no_grad():
        expected = [_expected_log_probs(reference, batch, index) for index in range(len(GRIDS))]
        for inputs in filter(None, batch["multimodal_train_inputs"]):
            inputs |= {name: values + 1 for name, values in inputs.items() if name.startswith("pixel")}
        blind = _expected_log_probs(reference, batch, 0)
    verify(f"log-probs of {kind} with images and videos", "transformers", ours, expected, tolerance=1e-5)
    assert (blind - expected[0]).abs().max() > 1e-2, "the images matter"


def _update(trainer: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The change of the weights in one step of plain descent."""
    before = {name: value.clone() for name, value in trainer.export_weights()}
    trainer.train(0, batch)
    return {name: value - before[name] for name, value in trainer.export_weights()}


SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "lr": 1.0}
IMITATE = {"loss_type": "sft_loss"}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_gradients_of_tower_and_language_model_equal_transformers(kind: str, recompute: bool, tmp_path: Path) -> None:
    reference = make_vision_model(kind, tmp_path)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    trainer = _trainer(tmp_path, **SGD, **IMITATE, **(full if recompute else {}))
    batch = make_vision_batch(GRIDS)
    loss = torch.zeros(())
    for index in range(len(GRIDS)):
        mask = batch["loss_masks"][index]
        if mask.any():
            loss = loss - (_expected_log_probs(reference, batch, index) * mask).sum() / mask.sum()
    (loss / len(GRIDS)).backward()
    update = _update(trainer, batch)
    expected = {name: -parameter.grad for name, parameter in reference.named_parameters() if name in update}
    assert expected.keys() == update.keys()
    assert sum("visual" in name for name in expected) > 20
    verify(
        f"gradients of {kind} with images{', recomputed' if recompute else ''}",
        "transformers",
        [update[name] for name in expected],
        list(expected.values()),
        tolerance=1e-5,
        scale="mixed",
    )


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_tower_and_language_model_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    make_vision_model(kind, tmp_path, torch.bfloat16)
    trainer = _trainer(tmp_path, fp32=False)
    saved = load_file(tmp_path / "model.safetensors")
    exported = dict(trainer.export_weights())
    assert exported.keys() == saved.keys()
    for name, value in exported.items():
        verify(f"bf16 weights of {kind} with its tower", "the checkpoint", value.to(saved[name].dtype), saved[name])


def test_the_towers_rope_stays_in_fp32_in_a_model_of_16_bits(tmp_path: Path) -> None:
    reference = make_vision_model("qwen3_vl", tmp_path)
    rope = _trainer(tmp_path, fp32=False)._ready.chunks[0].module.module.vision_model.rotary_pos_emb
    assert torch.equal(rope.inv_freq, reference.model.visual.rotary_pos_emb.inv_freq)


def test_a_frozen_tower_stays_as_it_is_and_the_rest_learns(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    update = _update(_trainer(tmp_path, freeze_params_name_list=["^vision_model"]), make_vision_batch(GRIDS))
    moved = {name for name, delta in update.items() if delta.any()}
    assert moved == {name for name in update if ".visual." not in name}


def test_only_the_mergers_learn_where_they_are_named(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    only = ["vision_model.*merger"]
    update = _update(_trainer(tmp_path, only_train_params_name_list=only), make_vision_batch(GRIDS))
    moved = {name for name, delta in update.items() if delta.any()}
    assert moved == {name for name in update if "merger" in name}
    assert any("deepstack" in name for name in moved)


def test_a_checkpoint_of_megatron_has_the_tower(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path / "hf")
    trainer = _trainer(tmp_path / "hf", save=str(tmp_path / "save"))
    trainer.train(0, make_vision_batch(GRIDS))
    trainer.save(0)
    trained = {name: value.clone() for name, value in trainer.export_weights()}
    blind = {"load": str(tmp_path / "save"), "multimodal_keys": None}
    with pytest.raises(ConfigError, match="has a vision tower, but this run builds none: give --multimodal-keys"):
        _trainer(tmp_path / "hf", **blind)
    again = _trainer(tmp_path / "hf", load=str(tmp_path / "save"))
    for name, value in again.export_weights():
        assert torch.equal(value, trained[name]), name


def test_without_images_in_the_flags_the_language_model_alone_is_built(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    trainer = _trainer(tmp_path, multimodal_keys=None)
    assert not any("visual" in name for name, _ in trainer.export_weights())
    with pytest.raises(DataError, match="samples with images, which"):
        trainer._train_batch(make_vision_batch(GRIDS))


def test_a_rollout_without_images_needs_nothing_of_the_tower(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    batch = make_batch(4)
    update = _update(_trainer(tmp_path, **SGD), batch)
    assert not any(delta.any() for name, delta in update.items() if ".visual." in name)
    text = _update(_trainer(tmp_path, **SGD, multimodal_keys=None), batch)
    for name, delta in text.items():
        assert torch.equal(delta, update[name]), name


def test_media_that_are_not_among_the_tokens_are_an_error(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    trainer = _trainer(tmp_path)
    batch = make_vision_batch(GRIDS)
    tokens = batch["tokens"][0]
    batch["tokens"][0] = tokens.masked_fill(tokens == IMAGE, START)
    with pytest.raises(DataError, match=r"samples \[0, 1, 2\]: Unused image grids"):
        trainer._log_probs(trainer._train_batch(batch))


def test_a_family_without_a_tower_refuses_images(tmp_path: Path) -> None:
    from slime.models.hf_shape import read_shape
    from tests.unit.megatron_utils.tiny_trainer import make_hf_model

    make_hf_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="no vision tower that can be trained"):
        read_shape(str(tmp_path), with_vision=True)


def test_the_provider_of_a_launch_script_builds_the_tower(tmp_path: Path) -> None:
    from slime_plugins.models.qwen3_5_vl import get_qwen3_5_vl_model_provider

    make_vision_model("qwen3_5", tmp_path)
    trainer = _trainer(tmp_path, multimodal_keys=None)  # starts the process
    provided = get_qwen3_5_vl_model_provider(trainer._args)()
    names = {name for name, _ in provided.named_parameters() if name.startswith("vision_model.")}
    assert len(names) > 20
    assert not any("vision_model" in name for name, _ in trainer._ready.chunks[0].named_parameters())


def test_a_checkpoint_with_its_tower_is_converted_there_and_back_bit_for_bit(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.conversion import OfflineModel

    make_vision_model("qwen3_vl", tmp_path / "hf")
    spec = ["slime_plugins.models.qwen3_vl", "get_qwen3_vl_model_provider"]
    with OfflineModel(RunConfig.of(make_args(tmp_path / "hf", spec=spec))) as there:
        there.load_hf()
        there.save_release(str(tmp_path / "dist"))
    dist = ("--input-dir", str(tmp_path / "dist" / "release"))
    with OfflineModel(RunConfig.of(make_args(tmp_path / "hf")), reads=dist) as back:
        back.load_torch_dist(*dist)
        exported = dict(back.export())
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
