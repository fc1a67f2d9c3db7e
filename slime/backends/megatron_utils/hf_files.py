"""Hugging Face checkpoints on disk: named tensors from safetensors files, and a complete directory written at once.

Used by ``hf_checkpoint`` and the conversion tools. Knows files, not models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.protocols import NamedTensor
from slime.utils.errors import ConfigError

__all__ = ["TensorReader", "write_hf_directory"]

_INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"
_MAX_FILE_BYTES = 5 * 1024**3
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


class TensorReader:
    """Named tensors of a safetensors checkpoint, one file or many.

    Weights in 8 bits with block-wise scales (``<name>_scale_inv``, DeepSeek-V3's format) come out in bfloat16.

    Args:
        flag: the flag that named ``directory``, for messages.

    Raises:
        ConfigError: there is no safetensors file, or one is damaged or missing.
    """

    def __init__(self, directory: str | Path, flag: str) -> None:
        self.directory = Path(directory)
        self.where = f"{flag} {directory}"
        self._open: dict[str, Any] = {}
        index = self.directory / _INDEX
        if index.is_file():
            self._files: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self.where}: there is no .safetensors file; other formats are not read.")
        self._files = {name: file.name for file in files for name in self._handle(file.name).keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> set[str]:
        """Names of all weights; their scales are not counted."""
        return {name for name in self._files if not name.endswith(_SCALE)}

    def get(self, name: str) -> torch.Tensor:
        tensor = self._handle(self._files[name]).get_tensor(name)
        if tensor.element_size() == 1 and name + _SCALE in self._files:
            scale = self._handle(self._files[name + _SCALE]).get_tensor(name + _SCALE)
            return _dequantise(tensor, scale)
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except Exception as error:  # safetensors raises a class of its own for a damaged file
                raise ConfigError(f"{self.where}: cannot read {file}: {error}") from None
        return self._open[file]


def _dequantise(tensor: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """DeepSeek-V3's format: each block of 128 x 128 values has one fp32 factor; ``[M, N]`` -> bfloat16 ``[M, N]``."""
    rows, columns = tensor.shape
    factors = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return (tensor.float() * factors).bfloat16()


def write_hf_directory(
    weights: Iterable[NamedTensor], source: str, path: str, *, max_file_bytes: int | None = None
) -> None:
    """Write a complete Hugging Face checkpoint at ``path``, with every file of ``source`` that holds no weights.

    Tensors of ``source`` that ``weights`` does not hold (layers that were not built) are taken over unchanged, except
    a head that is tied to the embedding. Written beside the target and renamed at the end: ``path`` is never half a
    checkpoint.
    """
    target = Path(path)
    if target.resolve() == Path(source).resolve():
        raise ConfigError(f"--save-hf {path} is the --hf-checkpoint itself; name another directory.")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in Path(source).iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_FILES and file.name != _INDEX:
                shutil.copy2(file, partial / file.name)
        _write_tensors(_with_remainder(weights, source), partial, max_file_bytes or _MAX_FILE_BYTES)
        _drop_quantization(partial / "config.json")
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


def _with_remainder(weights: Iterable[NamedTensor], source: str) -> Iterator[NamedTensor]:
    written: set[str] = set()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor
    if not any(Path(source).glob("*.safetensors")):
        return
    reader = TensorReader(source, "--hf-checkpoint")
    for name in sorted(reader.names - written - {"lm_head.weight"}):
        yield name, reader.get(name)


def _drop_quantization(config: Path) -> None:
    """What is written is not quantised any more, whatever the source was."""
    if not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    if content.pop("quantization_config", None) is not None:
        config.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_tensors(weights: Iterable[NamedTensor], directory: Path, max_file_bytes: int) -> None:
    """``model-00001-of-0000N.safetensors`` of bounded size and their index, or one ``model.safetensors``."""
    files: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    num_bytes = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(files)}", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in weights:
        if pending and num_bytes + tensor.nbytes > max_file_bytes:
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
