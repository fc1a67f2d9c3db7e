"""An environment for problems with a picture: after a wrong answer it shows the picture again, larger.

The setting ``rollout_interaction_env_path`` names a module with ``build_env``, which returns an object with ``reset``,
``step``, ``format_observation`` and ``close``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from examples.geo3k_vlm.reward_geo3k import is_right
from slime.data.sample import Sample

__all__ = ["Geo3kEnv", "build_env"]

Observation = dict[str, Any]
"""``text``, and ``image`` as a PIL image or None."""


def build_env(sample: Sample, args: Namespace) -> Geo3kEnv:
    images = (sample.multimodal_inputs or {}).get("images") or [None]
    return Geo3kEnv(sample.label, images[0], args.geo3k_enlargement)


class Geo3kEnv:
    def __init__(self, label: Any, image: Any, enlargement: int) -> None:
        self.label = label
        self.image = image
        self.enlargement = enlargement

    def reset(self) -> None:
        """Nothing is kept from one step to the next."""

    def step(self, text: str) -> tuple[Observation, bool, dict[str, Any]]:
        """(observation, done, info) after a turn. Called in a thread."""
        right = is_right(text, self.label)
        image = self.image
        if image is not None:
            image = image.resize((image.width * self.enlargement, image.height * self.enlargement))
        return {"text": "no. area?", "image": None if right else image}, right, {"is_right": right}

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        """The user's next message. Pictures are PIL images."""
        image = [] if observation["image"] is None else [{"type": "image", "image": observation["image"]}]
        return {"role": "user", "content": [*image, {"type": "text", "text": observation["text"]}]}

    def close(self) -> None:
        """Nothing is held."""
