"""The places of images among the tokens of packed samples, and the positions of the tokens around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.training.data import TrainBatch
from slime.backends.training.media import MediaTokens, build_packed_mrope_position_ids, merge_inputs, place_media
from slime.utils.errors import DataError
from tests.unit.megatron_utils.tiny_vision_models import IMAGE, START, VIDEO, make_vision_batch, make_vision_model
from tests.verification import verify

IDS = MediaTokens(IMAGE, VIDEO, START, merge_size=2)
NAMES: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "spatial_merge_size": 2,
}
GRIDS = [[[1, 4, 4]], [], [[1, 4, 6], [1, 2, 2]], [[1, 12, 2]]]
VIDEOS = {0: [2, 2, 8], 1: [3, 4, 4]}


def _packed(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, batch["tokens"])])
    return torch.cat(batch["tokens"]), lengths.cumsum(0)


def test_positions_in_packed_sequences_are_those_of_transformers_in_each(tmp_path: Path) -> None:
    reference = make_vision_model("qwen3_vl", tmp_path).model
    batch = make_vision_batch(GRIDS, videos=VIDEOS)
    expected = []
    for tokens, inputs in zip(batch["tokens"], batch["multimodal_train_inputs"], strict=True):
        kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        grids = {name: (inputs or {}).get(name) for name in ("image_grid_thw", "video_grid_thw")}
        expected.append(reference.get_rope_index(tokens[None], kinds[None], **grids)[0][:, 0])
    tokens, borders = _packed(batch)
    merged = merge_inputs(batch["multimodal_train_inputs"])
    grids = (merged["image_grid_thw"], merged["video_grid_thw"])
    ours = build_packed_mrope_position_ids(tokens[None], borders, *grids, **NAMES)
    assert ours.shape == (3, 1, len(tokens))
    verify("positions of packed images and videos", "transformers", ours[:, 0], torch.cat(expected, dim=1))
    flat = build_packed_mrope_position_ids(tokens, borders.tolist(), *grids, **NAMES)
    assert torch.equal(flat, ours[:, 0])


def test_text_alone_has_the_same_position_on_all_axes() -> None:
    positions = build_packed_mrope_position_ids(torch.arange(5), [0, 2, 5], None, None, **NAMES)
    assert positions.tolist() == [[0, 1, 0, 1, 2]] * 3


def test_image_tokens_that_the_model_sampled_are_text() -> None:
    prompt = [1, START, IMAGE, IMAGE, 2]
    grid = torch.tensor([[1, 2, 4]])
    sampled = [IMAGE, 3, START, IMAGE, IMAGE, 4]
    for response in ([5, 5, 5, 5, 5, 5], sampled):
        tokens = torch.tensor(prompt + response)
        media = place_media(
            {"pixel_values": torch.zeros(8, 24), "image_grid_thw": grid},
            *(tokens[None], torch.tensor([0, len(tokens)]), IDS, torch.device("cpu")),
        )
        assert media.rows.tolist() == [2, 3]
        assert media.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert media.positions[0].tolist() == [0, 1, 2, 2, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "tokens",
    [[1, START, IMAGE, 2], [1, 2, IMAGE, IMAGE], [START, IMAGE, IMAGE, IMAGE], [IMAGE, IMAGE, 3, 4]],
    ids=["too few", "no start", "too many", "start of the sequence"],
)
def test_an_image_that_no_tokens_stand_for_is_an_error(tokens: list[int]) -> None:
    grids = torch.tensor([[1, 2, 4]])
    with pytest.raises(ValueError, match="Unused image grids: 1 of 1"):
        build_packed_mrope_position_ids(torch.tensor(tokens), [0, 4], grids, None, **NAMES)


def test_an_image_does_not_reach_into_the_next_sequence() -> None:
    tokens = torch.tensor([1, START, IMAGE, IMAGE, 2])
    with pytest.raises(ValueError, match="Unused image grids"):
        build_packed_mrope_position_ids(tokens, [0, 3, 5], torch.tensor([[1, 2, 4]]), None, **NAMES)


def test_an_output_of_the_processor_that_nobody_reads_is_an_error() -> None:
    with pytest.raises(DataError, match="'input_features'; understood are pixel_values"):
        merge_inputs([None, {"input_features": torch.zeros(1)}])


def test_a_batch_gives_users_the_inputs_of_a_micro_batch_behind_one_another() -> None:
    batch = make_vision_batch(GRIDS, videos=VIDEOS)
    inputs = TrainBatch(batch, torch.device("cpu"), media_tokens=IDS).media_inputs([2, 0])
    first, second = (batch["multimodal_train_inputs"][index] for index in (2, 0))
    assert torch.equal(inputs["pixel_values"], torch.cat([first["pixel_values"], second["pixel_values"]]))
    assert torch.equal(inputs["video_grid_thw"], second["video_grid_thw"])
