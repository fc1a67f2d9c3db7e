"""Which parameters learn: ``--only-train-params-name-list``, ``--freeze-params-name-list``, prediction layers.

Called by ``setup`` before the gradient buffers and the optimizer are made: frozen parameters are in neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.checkpoint.tensor_plan import chunks_of
from slime.utils.errors import ConfigError

__all__ = ["freeze_parameters", "global_names"]

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


def freeze_parameters(
    model: Any, *, only: Sequence[str] | None, freeze: Sequence[str] | None, trains_prediction: bool
) -> None:
    """Switch gradients off. A collective.

    Args:
        only: regular expressions; what none of them finds in its name is frozen.
        freeze: regular expressions; what one of them finds in its name is frozen.
        trains_prediction: multi-token-prediction layers learn as well.

    Raises:
        ConfigError: both are given, a pattern is no regular expression or finds no parameter on any rank, or nothing is
            left to train. Names are those of a model on one rank, such as ``decoder.layers.3.mlp.router.weight``.
    """
    if only and freeze:
        raise ConfigError("--only-train-params-name-list and --freeze-params-name-list exclude each other: give one.")
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    patterns = [_compiled(flag, pattern) for pattern in only or freeze or ()]
    parameters = list(global_names(model))
    if patterns:
        _check_found(flag, patterns, [name for name, _ in parameters])
    for name, parameter in parameters:
        is_found = any(pattern.search(name) for pattern in patterns)
        if (patterns and is_found == bool(freeze)) or (name.startswith("mtp.") and not trains_prediction):
            parameter.requires_grad_(False)
    count = torch.tensor(sum(parameter.requires_grad for _, parameter in parameters))
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, int(count))
    if not any(counts):
        raise ConfigError(f"{flag} {' '.join(only or freeze or ())} leaves no parameter to train.")


def global_names(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank with the layer numbers of the whole model."""
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            found = _LAYER.search(name)
            if found:
                number = chunk.decoder.layers[int(found.group())].layer_number - 1
                name = _LAYER.sub(str(number), name)
            yield name, parameter


def _compiled(flag: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{flag} {pattern}: not a regular expression: {error}.") from None


def _check_found(flag: str, patterns: Sequence[re.Pattern[str]], names: Sequence[str]) -> None:
    """A pattern that finds nothing on any rank is a typo: silently, everything would train, or nothing."""
    found: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, [any(pattern.search(name) for name in names) for pattern in patterns])
    for pattern, *hits in zip(patterns, *found, strict=True):
        if not any(hits):
            example = next((name for name in names if ".layers." in name), names[0])
            raise ConfigError(f"{flag} {pattern.pattern} finds no parameter; names look like {example}.")
