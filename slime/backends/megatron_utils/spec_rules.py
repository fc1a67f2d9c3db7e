"""A user's own layers, ``--spec MODULE FUNCTION``: which function that is, and whether it can be called.

Called by ``argument_rules`` and ``setup``. Imports neither torch nor megatron unless there is such a function, which
does so itself.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.vision_rules import VISION_SPECS
from slime.hooks.load import can_be_called, load_function
from slime.utils.errors import ConfigError

__all__ = ["BUILT_IN_SPECS", "spec", "user_spec"]

BUILT_IN_SPECS = (
    "slime_plugins.models.glm4",
    "slime_plugins.models.glm5.glm5",
    "slime_plugins.models.minimax_m2",
    "slime_plugins.models.qwen3_5",
    "slime_plugins.models.qwen3_next",
)
"""Modules of ``--spec`` whose layers the model families build without it."""


def user_spec(args: Namespace) -> Any | None:
    """What a user's ``--spec`` names: a function of (args, config, vp_stage), or layers; None without such a flag.

    Raises:
        ConfigError: it cannot be loaded, or the function takes other arguments.
    """
    words = getattr(args, "spec", None)
    if not words or words[0] in (*BUILT_IN_SPECS, *VISION_SPECS):
        return None
    flag = f"--spec {' '.join(words)}"
    if len(words) > 2:
        raise ConfigError(f"{flag}: give a module and a function, or one word such as file.py:function.")
    # the user's module imports megatron.core, which this makes importable on a CPU
    from slime.backends.megatron_utils.patches.install import install

    install()
    try:
        found = load_function(":".join(words))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if callable(found) and not can_be_called(found, ("args", "config", "vp_stage")):
        raise ConfigError(
            f"{flag} is called with (args, config, vp_stage), but its signature is {inspect.signature(found)} "
            "(see docs/en/get_started/customization.md)."
        )
    return found


def spec(args: Namespace) -> Iterator[str]:
    """The user's function can be loaded and called."""
    try:
        user_spec(args)
    except ConfigError as error:
        yield from error.problems
