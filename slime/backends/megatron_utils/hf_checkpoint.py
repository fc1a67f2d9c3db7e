"""Weights between a Hugging Face checkpoint and the live model, in both directions, by the family's table.

Called by ``actor`` and ``checkpoint``. One tensor at a time: a model larger than the host's memory never has to exist
twice. Knows layouts, not architectures: those are in ``families``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.megatron_utils.families.base import Layout, Rule
from slime.backends.megatron_utils.model import unwrap
from slime.backends.megatron_utils.model_shape import ModelShape
from slime.backends.protocols import NamedTensor
from slime.utils.errors import ConfigError

__all__ = ["export_weights", "load_weights", "write_hf_directory"]

_INDEX = "model.safetensors.index.json"
_MAX_FILE_BYTES = 5 * 1024**3
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


@torch.no_grad()
def load_weights(model: Any, shape: ModelShape, directory: str, flag: str) -> None:
    """Fill every parameter of ``model`` from the safetensors files in ``directory``.

    Args:
        flag: the flag that named the directory, for messages.

    Raises:
        ConfigError: a tensor is missing or has another shape than the model's; both shapes are named.
    """
    tensors = _Reader(directory, flag)
    for name, parameter in unwrap(model).named_parameters():
        rule, layer = _rule_of(name, shape)
        names = [hf_name.format(layer=layer) for hf_name in rule.hf]
        value = _to_megatron([tensors.get(hf_name) for hf_name in names], rule.layout, shape, parameter)
        if value.shape != parameter.shape:
            raise ConfigError(
                f"{flag} {directory}: {' + '.join(names)} makes {list(value.shape)}, but the model that config.json "
                f"describes needs {list(parameter.shape)} for {name}: config.json and weights do not belong together."
            )
        parameter.copy_(value)


@torch.no_grad()
def export_weights(model: Any, shape: ModelShape) -> Iterator[NamedTensor]:
    """All weights under Hugging Face names, without vocabulary padding, in the model's order and dtype.

    Tensors may be views of live parameters: use or copy them before the next optimizer step.
    """
    for name, parameter in unwrap(model).named_parameters():
        rule, layer = _rule_of(name, shape)
        parts = _from_megatron(parameter.detach(), rule.layout, shape)
        for hf_name, part in zip(rule.hf, parts, strict=True):
            yield hf_name.format(layer=layer), part


def write_hf_directory(weights: Iterable[NamedTensor], source: str, path: str) -> None:
    """Write a complete Hugging Face checkpoint at ``path``, with every file of ``source`` that holds no weights.

    Written beside the target and renamed at the end: ``path`` is never half a checkpoint.
    """
    target = Path(path)
    if target.resolve() == Path(source).resolve():
        raise ConfigError(f"--save-hf {path} is the --hf-checkpoint itself; name another directory.")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in Path(source).iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth") and file.name != _INDEX:
                shutil.copy2(file, partial / file.name)
        _write_tensors(weights, partial)
        if target.exists():
            old = target.with_name(f".{target.name}.old-{os.getpid()}")
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old)
        else:
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _Reader:
    """Named tensors of a safetensors checkpoint, one file or many."""

    def __init__(self, directory: str, flag: str) -> None:
        self._directory = Path(directory)
        self._where = f"{flag} {directory}"
        self._open: dict[str, Any] = {}
        index = self._directory / _INDEX
        if index.is_file():
            self._files: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self._where}: there is no .safetensors file; other formats are not read.")
        self._files = {name: file.name for file in files for name in self._handle(file.name).keys()}  # noqa: SIM118

    def get(self, name: str) -> torch.Tensor:
        if name not in self._files and name == "lm_head.weight":
            name = "model.embed_tokens.weight"  # an untied head that starts from a tied checkpoint
        if name not in self._files:
            raise ConfigError(f"{self._where}: tensor {name} is missing in its .safetensors files.")
        return self._handle(self._files[name]).get_tensor(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._directory / file, framework="pt")
            except Exception as error:  # safetensors raises a class of its own for a damaged file
                raise ConfigError(f"{self._where}: cannot read {file}: {error}") from None
        return self._open[file]


def _rule_of(name: str, shape: ModelShape) -> tuple[Rule, str]:
    """The line of the family's table for a Megatron parameter, and its layer number."""
    layer = _LAYER.search(name)
    pattern = _LAYER.sub("{layer}", name)
    for rule in shape.family.rules:
        if rule.megatron == pattern:
            return rule, layer.group() if layer else ""
    raise ConfigError(f"model_type {shape.model_type}: the family's table has no line for parameter {name}.")


def _to_megatron(parts: list[torch.Tensor], layout: Layout, shape: ModelShape, like: torch.Tensor) -> torch.Tensor:
    match layout:
        case "copy":
            return parts[0]
        case "vocab":
            missing = like.shape[0] - parts[0].shape[0]
            if missing <= 0 or parts[0].shape[0] != shape.vocab_size:
                return parts[0]
            return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])])
        case "gate_up":
            return torch.cat(parts)
        case "qkv":
            groups = [part.reshape(shape.num_query_groups, -1, *part.shape[1:]) for part in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)


def _from_megatron(tensor: torch.Tensor, layout: Layout, shape: ModelShape) -> list[torch.Tensor]:
    match layout:
        case "copy":
            return [tensor]
        case "vocab":
            return [tensor[: shape.vocab_size]]
        case "gate_up":
            return list(tensor.chunk(2))
        case "qkv":
            groups = tensor.reshape(shape.num_query_groups, -1, *tensor.shape[1:])
            query_rows = groups.shape[1] - 2 * shape.head_dim
            split = groups.split([query_rows, shape.head_dim, shape.head_dim], dim=1)
            return [part.flatten(0, 1) for part in split]


def _write_tensors(weights: Iterable[NamedTensor], directory: Path) -> None:
    """``model-00001-of-0000N.safetensors`` of bounded size and their index, or one ``model.safetensors``."""
    files: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    num_bytes = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(files)}", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in weights:
        if pending and num_bytes + tensor.nbytes > _MAX_FILE_BYTES:
            flush()
            num_bytes = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
    flush()
    if len(files) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{index}").rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    total = sum(size for names in files for size in names.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
