"""Prompts with none, one or two images, made by code."""

from __future__ import annotations

import json
from pathlib import Path

from examples.tiny.vision import as_text

__all__ = ["make_vision_prompts"]


def make_vision_prompts(path: Path, count: int) -> str:
    """Rows with no image, one, or two in turn, in different sizes and colors."""
    from PIL import Image

    rows = []
    for row in range(count):
        images = []
        for index in range(row % 3):
            size = [(16, 24), (24, 16), (16, 16), (32, 24)][(row + index) % 4]
            images.append(as_text(Image.new("RGB", size, ((40 * row) % 256, (90 * index) % 256, 50))))
        message = {"role": "user", "content": "<image>" * len(images) + "What?"}
        rows.append(json.dumps({"prompt": [message], "images": images, "label": "7"}))
    path.write_text("\n".join(rows))
    return str(path)
