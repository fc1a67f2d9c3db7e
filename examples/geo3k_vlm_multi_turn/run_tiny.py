"""Problems with a picture in two turns, on one machine without a GPU.

    python examples/geo3k_vlm_multi_turn/run_tiny.py --output outputs/geo3k_vlm_multi_turn

1. Pictures of rectangles on a grid, and a random vision-language model.
2. A supervised warm start: first answers are guesses half of the time, answers to the larger picture are right.
3. GRPO with the environment: an answer that is right at once is worth twice as much as one after the second picture.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.geo3k_vlm_multi_turn.env_geo3k import Geo3kEnv
from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.vision import AREA_FLAGS, END, area_problem, as_text, make_vision_model

QUESTION = {"role": "user", "content": "<image>area?"}


def demonstrations(count: int) -> Iterator[dict[str, Any]]:
    """One-turn rows, and rows whose prompt ends with the environment's answer to a wrong guess."""
    draw = random.Random(1)
    for number in range(count):
        image, area = area_problem(draw)
        guess = str(draw.randint(1, 9))
        prompt, images, answer = [QUESTION], [image], area if draw.random() < 0.5 else guess
        # A right guess ends the conversation, so it has no second turn.
        if number % 2 and guess != area:
            said, _, _ = Geo3kEnv(area, image, enlargement=2).step(guess)
            told = {"role": "user", "content": f"<image>{said['text']}"}
            prompt = [QUESTION, {"role": "assistant", "content": f"{guess}{END}"}, told]
            images, answer = [image, said["image"]], area
        segments = {"segments": [[f"{answer}{END}", 1]]}
        yield {"prompt": prompt, "images": [as_text(image) for image in images], "metadata": segments}


def main() -> None:
    output = options(__doc__, "geo3k_vlm_multi_turn").output
    problems = (area_problem(random.Random(seed)) for seed in range(256))
    rows = ({"prompt": [QUESTION], "images": [as_text(image)], "label": area} for image, area in problems)
    data = write_rows(output / "train.jsonl", rows)
    shutil.copy(Path(__file__).parent / "geo3k.yaml", output)
    model = warm_start(
        make_vision_model(output / "tiny"), demonstrations(5 * ROWS_PER_ROLLOUT), output, rollouts=5, flags=AREA_FLAGS
    )
    flags = [
        *(*AREA_FLAGS, "--rollout-max-response-len", 64, "--max-turns", 2),
        *("--custom-generate-function-path", "examples.geo3k_vlm_multi_turn.rollout.generate"),
        *("--custom-config-path", output / "geo3k.yaml"),
    ]
    records = learn("GRPO with an environment", model, data, flags, output, rollouts=6)
    print_first_and_last("reward of a sample", records)


if __name__ == "__main__":
    main()
