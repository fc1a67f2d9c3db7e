"""Images and videos among the tokens of a packed micro-batch: rows of their features, and positions of all tokens.

    tokens      t t S I I I I t r r | t t r | S I I I I ...     S starts a medium, I is one of its features
    features          0 1 2 3                   4 5 6 7         of all media of the micro-batch, concatenated

A run of I tokens is the next image (or frame of a video) if an S is before it and it is as long as the image needs.
Any other, such as one that the model sampled, is text. Called by ``data``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from slime.utils.errors import DataError

_READ = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
# the tokens hold the same facts, or no model reads them
_NOT_NEEDED = ("mm_token_type_ids", "second_per_grid_ts")


@dataclass(frozen=True)
class MediaTokens:
    """Ids of a model's media tokens, and the number of patches along one side that become one token."""

    image: int
    video: int
    start: int
    merge_size: int


@dataclass(frozen=True)
class Media:
    """The images and videos of a micro-batch, on the device.

    Attributes:
        pixel_values: ``[patches, values per patch]``, images and then videos.
        grids: int64 ``[n, 3]``: patches along time, height and width of each.
        rows: int64 ``[features]``, the row of the packed ``[T]`` that each feature takes the place of.
        positions: int64 ``[3, T]``: along time, height and width, of every row of the whole micro-batch.
    """

    pixel_values: torch.Tensor
    grids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class _Run:
    """Tokens ``begin`` to ``end`` are a grid of ``height`` x ``width`` at ``time`` instants."""

    begin: int
    end: int
    time: int
    height: int
    width: int


def merge_inputs(per_sample: Sequence[Mapping[str, Any] | None]) -> dict[str, torch.Tensor]:
    """Processor outputs of several samples, merged into one. Empty if none of them has media.

    Raises:
        DataError: outputs that no model here reads.
    """
    merged: dict[str, list[torch.Tensor]] = {}
    for inputs in per_sample:
        for name, value in (inputs or {}).items():
            if name in _NOT_NEEDED or value is None:
                continue
            if name not in _READ:
                raise DataError(f"multimodal_train_inputs has {name!r}; understood are {', '.join(_READ)}")
            merged.setdefault(name, []).append(torch.as_tensor(value))
    return {name: torch.cat(parts) for name, parts in merged.items()}


def place_media(
    inputs: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ids: MediaTokens,
    device: torch.device,
) -> Media:
    """The media of a packed micro-batch.

    Args:
        inputs: of :func:`merge_inputs`, not empty.
        tokens, cu_seqlens: ``[T]`` and ``[S + 1]`` of the whole micro-batch.

    Raises:
        DataError: tokens and media do not belong together.
    """
    images, videos = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
    flat, borders = tokens.reshape(-1).cpu(), cu_seqlens.tolist()
    try:
        of_images, of_videos = _runs(flat, borders, images, videos, ids)
    except ValueError as error:
        raise DataError(f"{error}: their tokens and multimodal_train_inputs do not belong together") from None
    rows = [torch.arange(run.begin, run.end) for run in (*of_images, *of_videos)]
    pixels = [inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs]
    grids = [grid for grid in (images, videos) if grid is not None]
    return Media(
        torch.cat(pixels).to(device),
        torch.cat(grids).to(device=device, dtype=torch.int64),
        torch.cat(rows).to(device),
        _positions(len(flat), borders, sorted([*of_images, *of_videos], key=lambda run: run.begin)).to(device),
    )


def build_packed_mrope_position_ids(
    input_ids: torch.Tensor,
    cu_seqlens: Sequence[int] | torch.Tensor,
    image_grid_thw: torch.Tensor | None,
    video_grid_thw: torch.Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    spatial_merge_size: int,
) -> torch.Tensor:
    """Positions along time, height and width for multimodal rope. They begin at 0 in every packed sequence.

    A text token is one further than the one before it on all three axes. The tokens of an image lie on a grid, and the
    text after it goes on after the longer side (Qwen2-VL, arXiv:2409.12191, section 2.1). Each frame of a video is a
    separate grid, as Qwen3-VL's and Qwen3.5's processors write them.

    Args:
        input_ids: int64 ``[T]`` or ``[1, T]``.
        cu_seqlens: ``[S + 1]``, where each sequence begins, and T.
        image_grid_thw, video_grid_thw: ``[n, 3]`` in patches, in the order of the tokens.

    Returns:
        int64 ``[3, T]`` or ``[3, 1, T]``, on the device of ``input_ids``.

    Raises:
        ValueError: more grids than runs of media tokens.
    """
    ids = MediaTokens(image_token_id, video_token_id, vision_start_token_id, spatial_merge_size)
    borders = [int(border) for border in cu_seqlens]
    flat = input_ids.reshape(-1).cpu()
    of_images, of_videos = _runs(flat, borders, image_grid_thw, video_grid_thw, ids)
    positions = _positions(len(flat), borders, sorted([*of_images, *of_videos], key=lambda run: run.begin))
    return positions.view(3, *input_ids.shape).to(input_ids.device)


def _runs(
    tokens: torch.Tensor,
    borders: Sequence[int],
    images: torch.Tensor | None,
    videos: torch.Tensor | None,
    ids: MediaTokens,
) -> tuple[list[_Run], list[_Run]]:
    """The places of images, and of the frames of videos."""
    if videos is not None:  # each frame has a start token, and text with its time
        videos = videos.repeat_interleave(videos[:, 0], dim=0)
        videos[:, 0] = 1
    return (
        list(_runs_of(tokens, borders, images, ids.image, ids, "image")),
        list(_runs_of(tokens, borders, videos, ids.video, ids, "video")),
    )


def _runs_of(
    tokens: torch.Tensor, borders: Sequence[int], grids: torch.Tensor | None, token: int, ids: MediaTokens, what: str
) -> Iterator[_Run]:
    waiting = [] if grids is None else grids.tolist()
    waiting.reverse()
    is_first = torch.zeros(len(tokens) + 1, dtype=torch.bool)
    is_first[torch.as_tensor(borders)] = True
    is_token = torch.cat([tokens == token, torch.zeros(1, dtype=torch.bool)])
    before = torch.cat([torch.zeros(1, dtype=torch.bool), is_token[:-1]])
    # a run also ends at the border of a packed sequence
    begins = (is_token & (is_first | ~before)).nonzero().flatten().tolist()
    ends = (before & (is_first | ~is_token)).nonzero().flatten().tolist()
    for begin, end in zip(begins, ends, strict=True):
        # such tokens are text, for example if the model sampled them
        if not waiting or is_first[begin] or int(tokens[begin - 1]) != ids.start:
            continue
        time, height, width = waiting[-1][0], waiting[-1][1] // ids.merge_size, waiting[-1][2] // ids.merge_size
        if end - begin == time * height * width:
            waiting.pop()
            yield _Run(begin, end, time, height, width)
    if waiting:
        raise ValueError(f"Unused {what} grids: {len(waiting)} of {len(grids if grids is not None else ())}")


def _positions(num_tokens: int, borders: Sequence[int], runs: Sequence[_Run]) -> torch.Tensor:
    """``[3, T]``. ``runs`` in the order of the tokens."""
    positions = torch.empty(3, num_tokens, dtype=torch.int64)
    left = list(reversed(runs))
    for begin, end in pairwise(borders):
        row, position = begin, 0
        while row < end:
            run = left[-1] if left and left[-1].begin < end else None
            text_end = end if run is None else run.begin
            positions[:, row:text_end] = torch.arange(position, position + text_end - row)
            position += text_end - row
            row = text_end
            if run is not None:
                axes = [torch.arange(size) + position for size in (run.time, run.height, run.width)]
                grid = torch.meshgrid(*axes, indexing="ij")
                positions[:, row : run.end] = torch.stack(grid).view(3, -1)
                # text goes on after the longer side of the grid
                position += max(run.height, run.width)
                row = run.end
                left.pop()
    return positions
