"""Hugging Face checkpoints: read into the model, exported from it, written to a directory. Driven by the family table."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.megatron_utils.families.registry import FAMILIES
from slime.backends.megatron_utils.model import unwrap
from slime.backends.megatron_utils.model_shape import ModelShape
from slime.backends.protocols import NamedTensor
from slime.utils.errors import ConfigError

__all__ = ["export_hf", "is_hf_checkpoint", "load_hf", "write_hf"]

_VOCAB_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")
_SHARD_BYTES = 4 * 1024**3
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def is_hf_checkpoint(path: str | Path) -> bool:
    return (Path(path) / "config.json").is_file()


class _Reader:
    """Tensors of a directory of safetensors files by name."""

    def __init__(self, path: str | Path, flag: str) -> None:
        self._path, self._flag = Path(path), flag
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{flag} {path}: there is no *.safetensors file in that directory.")
        self._handles = [safe_open(file, framework="pt") for file in files]
        self._where = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118 - no iterator

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ConfigError(f"{self._flag} {self._path}: the checkpoint has no tensor {name}.")
        return self._where[name].get_tensor(name)


@torch.no_grad()
def load_hf(model: torch.nn.Module, path: str | Path, shape: ModelShape, *, flag: str = "--hf-checkpoint") -> None:
    """Copy the weights of the Hugging Face directory ``path`` into ``model``."""
    read = _Reader(path, flag)
    rules = FAMILIES[shape.family].rules(shape)
    for name, parameter in unwrap(model).named_parameters():
        rule = rules[name]
        tensor = rule.to_megatron([read(source) for source in rule.sources], shape)
        if name in _VOCAB_PARAMETERS and tensor.shape[0] < parameter.shape[0]:
            padding = tensor.new_zeros(parameter.shape[0] - tensor.shape[0], *tensor.shape[1:])
            tensor = torch.cat([tensor, padding])
        if tensor.shape != parameter.shape:
            raise ConfigError(
                f"{flag} {path}: {', '.join(rule.sources)} gives {tuple(tensor.shape)} for {name}, "
                f"the model has {tuple(parameter.shape)}."
            )
        parameter.copy_(tensor)


@torch.no_grad()
def export_hf(model: torch.nn.Module, shape: ModelShape) -> Iterator[NamedTensor]:
    """Every weight under its Hugging Face name, without vocabulary padding."""
    rules = FAMILIES[shape.family].rules(shape)
    for name, parameter in unwrap(model).named_parameters():
        tensor = parameter.detach()
        if name in _VOCAB_PARAMETERS:
            tensor = tensor[: shape.vocab_size]
        rule = rules[name]
        yield from zip(rule.sources, rule.to_hf(tensor, shape), strict=True)


def write_hf(weights: Iterator[NamedTensor], path: str | Path, *, template: str | Path) -> None:
    """Write a loadable Hugging Face directory: ``weights`` plus every other file of ``template``.

    Written beside its final place and renamed at the end: the directory is complete or not there.
    """
    path, template = Path(path), Path(template)
    if path.resolve() == template.resolve():
        raise ConfigError(f"--save-hf {path} is the directory of --hf-checkpoint; it would be overwritten.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for file in template.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copy2(file, temporary / file.name)
        _write_shards(weights, temporary)
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_shards(weights: Iterator[NamedTensor], directory: Path) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    total = 0
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous().cpu().clone()
        size += num_bytes
        total += num_bytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
