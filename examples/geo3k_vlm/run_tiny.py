"""Problems with a picture on one machine without a GPU: a tiny Qwen3-VL reads off an area.

    python examples/geo3k_vlm/run_tiny.py --output outputs/geo3k_vlm

1. Pictures of rectangles on a grid, and a random vision-language model.
2. A supervised warm start from a teacher who counts the cells of half of the rectangles and guesses otherwise.
3. GRPO, rewarded for right answers: guessing disappears.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.vision import AREA_FLAGS, END, area_problem, as_text, make_vision_model

PROMPT = [{"role": "user", "content": "<image>area?"}]


def demonstrations(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(1)
    for _ in range(count):
        image, area = area_problem(draw)
        answer = area if draw.random() < 0.5 else str(draw.randint(1, 9))
        yield {"prompt": PROMPT, "images": [as_text(image)], "metadata": {"segments": [[f"{answer}{END}", 1]]}}


def main() -> None:
    output = options(__doc__, "geo3k_vlm").output
    problems = (area_problem(random.Random(seed)) for seed in range(256))
    rows = ({"prompt": PROMPT, "images": [as_text(image)], "label": area} for image, area in problems)
    data = write_rows(output / "train.jsonl", rows)
    model = warm_start(
        make_vision_model(output / "tiny"), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4, flags=AREA_FLAGS
    )
    flags = [
        *(*AREA_FLAGS, "--rollout-max-response-len", 4),
        *("--custom-rm-path", "examples.geo3k_vlm.reward_geo3k.reward_func"),
    ]
    print_first_and_last("reward of an answer", learn("GRPO on pictures", model, data, flags, output, rollouts=8))


if __name__ == "__main__":
    main()
