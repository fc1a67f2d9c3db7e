"""Reads and writes Hugging Face checkpoints: named tensors from safetensors files, and complete directories.

Used by the backends' conversions from and to Hugging Face names, and by the conversion tools.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from slime.backends import NamedTensor
from slime.backends.training.hf_export import (
    INDEX,
    MARKER,
    Content,
    StoredTensor,
    begin_export,
    beside,
    finish_export,
    name_shards,
    spread,
    write_shards,
)
from slime.utils.distributed_utils import do_on_first_rank, files_group
from slime.utils.errors import ConfigError, SlimeError, kept, named, translated, undone

logger = logging.getLogger(__name__)

# suffixes of the scales of a quantized weight: by blocks, and of the whole tensor or its rows
_SCALES = ("_scale_inv", "_scale")
_PACKED = "_packed"
_SHAPE = "_shape"
_PARTS_OF_PACKED = ("_scale", _SHAPE)
_OF_OTHER_PACKINGS = ("_zero_point", "_g_idx")
_MAX_FILE_BYTES = 5 * 1024**3
_MAX_WRITERS = 32
# shows a rank that its directory is that of rank 0
_TOKEN = "slime_writers"
_NAMED_PROBLEMS = 8
_LAYER = re.compile(r"\.\d+\.")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


class TensorReader:
    """Named tensors of a safetensors checkpoint, one file or many.

    Weights in 8 bits come out in bfloat16: those with a scale per block (``<name>_scale_inv``, DeepSeek-V3's format),
    per row or per tensor (``<name>_scale``). So do those in 4 bits, of which ``<name>_packed``, ``<name>_scale`` and
    ``<name>_shape`` are stored (compressed-tensors, pack-quantized, symmetric).

    Args:
        flag: the flag that named ``directory``, for messages.

    Raises:
        ConfigError: a safetensors file is damaged or missing, or the directory has none.
    """

    def __init__(self, directory: str | Path, flag: str) -> None:
        self.directory = Path(directory)
        self.where = f"{flag} {directory}"
        self._open: dict[str, Any] = {}
        self._files = self._find_files()
        self._packed = {name.removesuffix(_PACKED) for name in self._files if name.endswith(".weight" + _PACKED)}

    def _find_files(self) -> Mapping[str, str]:
        """The file of every stored tensor."""
        index = self.directory / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{self.where}: {INDEX} is damaged ({type(error).__name__}: {error}): it must hold a weight_map "
                    "from tensors to files."
                ) from None
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self.where}: there is no .safetensors file; other formats are not read.")
        return {name: file.name for file in files for name in self._handle(file.name).keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._packed

    @property
    def names(self) -> set[str]:
        """Names of all weights. Their scales are not counted."""
        scales = {name + suffix for name in self._files for suffix in _SCALES}
        parts = {name + suffix for name in self._packed for suffix in (_PACKED, *_PARTS_OF_PACKED, *_OF_OTHER_PACKINGS)}
        return {name for name in self._files if name not in scales | parts} | self._packed

    def names_in(self, files: Iterable[str]) -> set[str]:
        """Those of :attr:`names` that are stored in ``files``.

        Raises:
            ConfigError: a file does not exist.
        """
        wanted = {Path(file).name for file in files}
        if unknown := sorted(wanted - set(self._files.values())):
            raise ConfigError(f"{self.where}: no tensor is in {', '.join(unknown)}.")
        return {name for name in self.names if self._files[name + _PACKED if name in self._packed else name] in wanted}

    def get(self, name: str) -> torch.Tensor:
        if name in self._packed:
            return self._unpacked(name)
        tensor = self._stored(name)
        if not (tensor.is_floating_point() and tensor.element_size() == 1):
            return tensor
        for suffix in _SCALES:
            if name + suffix in self._files:
                return _dequantise(tensor, self._stored(name + suffix), self._block)
        raise ConfigError(
            f"{self.where}: {name} has 8 bits per number, but there is no {name}{_SCALES[0]} to scale it."
        )

    def integers(self, names: Iterable[str]) -> list[str]:
        """A problem per stored tensor of ``names`` that holds integers, such as those of a format that is not read."""
        found = (
            (name, self._handle(self._files[name]).get_slice(name).get_dtype()) for name in names if name in self._files
        )
        return [
            f"{self.where}: tensor {name} in {self._files[name]} holds {dtype} numbers. Weights must be floating-point "
            "numbers: take the original checkpoint, or convert this one to bf16."
            for name, dtype in found
            if dtype[0] in "IU" or dtype == "BOOL"
        ]

    def tied_head(self, is_tied: bool) -> list[str]:
        """A problem if the files contradict ``tie_word_embeddings``: the trained model would not be the saved one."""
        heads = [name for name in self.names if name.endswith("lm_head.weight")]
        tables = [name for name in self.names if name.endswith("embed_tokens.weight") and not _LAYER.search(name)]
        if len(tables) != 1 or (is_tied and not heads):
            return []
        (table,) = tables
        if not is_tied and not heads:
            fix = "Set it to true if the head is the embedding, else add the missing tensor."
            return [f"{self.where}: config.json has tie_word_embeddings false, but no file has lm_head.weight. {fix}"]
        if not is_tied or (
            self.shape(heads[0]) == self.shape(table) and torch.equal(self.get(heads[0]), self.get(table))
        ):
            return []
        return [
            f"{self.where}: config.json has tie_word_embeddings true, but {heads[0]} in {self._files[heads[0]]} is not "
            f"equal to {table}. Set it to false to train this head, or remove the tensor."
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of ``get(name)``, without reading the tensor."""
        if name in self._packed:
            return tuple(int(size) for size in self._stored(name + _SHAPE))
        return tuple(self._handle(self._files[name]).get_slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        """Bytes of ``get(name)``, without reading the tensor."""
        numbers = math.prod(self.shape(name))
        if name in self._packed:
            return numbers * torch.bfloat16.itemsize
        dtype = self._handle(self._files[name]).get_slice(name).get_dtype()
        bits = re.search(r"\d+", dtype)  # BF16, I64, F8_E4M3, BOOL
        size = 1 if bits is None else int(bits.group()) // 8
        return numbers * (torch.bfloat16.itemsize if dtype.startswith("F8") else size)

    def row(self, name: str, index: int) -> torch.Tensor:
        """``get(name)[index]``. Of a plain tensor nothing else is read."""
        if name in self._packed or any(name + suffix in self._files for suffix in _SCALES):
            return self.get(name)[index]
        row: torch.Tensor = self._handle(self._files[name]).get_slice(name)[index]
        return row

    def _unpacked(self, name: str) -> torch.Tensor:
        if wrong := [name + suffix for suffix in _OF_OTHER_PACKINGS if name + suffix in self._files]:
            raise ConfigError(f"{self.where}: {wrong[0]} is of an asymmetric or reordered packing, which is not read.")
        scale, shape = (self._stored(name + suffix) for suffix in _PARTS_OF_PACKED)
        rows, columns = (int(size) for size in shape)
        words = self._stored(name + _PACKED)
        if words.shape != (rows, -(-columns // 8)):
            raise ConfigError(
                f"{self.where}: {name}{_PACKED} has shape {list(words.shape)}, which is not 4 bits for each of "
                f"{rows} x {columns} numbers; other precisions are not read."
            )
        return _unpack(words, scale, columns)

    def _stored(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(self._files[name]).get_tensor(name)
        return tensor

    @functools.cached_property
    def _block(self) -> tuple[int, int]:
        config = self.directory / "config.json"
        content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        rows, columns = (content.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        return int(rows), int(columns)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            # safetensors has a class of its own for a damaged file
            with translated(lambda error: ConfigError(f"{self.where}: cannot read {file}: {error}")):
                self._open[file] = safe_open(self.directory / file, framework="pt")
        return self._open[file]


def _unpack(words: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 ``[M, ceil(N / 8)]``, value k of a word in bits 4k, and scales ``[M, groups]`` -> bfloat16 ``[M, N]``.

    ``(nibble - 8) * scale``, the inverse of ``slime.weight_sync.quantize.quantize_int4``.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = ((words[..., None] >> shifts) & 15).flatten(1)[:, :columns] - 8
    return (values * scale.float().repeat_interleave(columns // scale.shape[1], 1)).bfloat16()


def _dequantise(tensor: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``[M, N]`` -> bfloat16. ``scale``: one number per block (the last ones may be smaller), per row, or for all."""
    rows, columns = tensor.shape
    if scale.numel() == 1:
        factors = scale.view(1, 1)
    # as many blocks as rows are possible: then the shape decides
    elif scale.numel() == rows and scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        factors = scale.view(rows, 1)
    else:
        factors = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (tensor.float() * factors.float()).bfloat16()


def raise_everywhere(problems: list[str]) -> None:
    """Raise on every rank if any rank has problems, so that none waits for one that has failed. A collective.

    Raises:
        ConfigError: the problems of all ranks.
    """
    everywhere = [problems]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere = [[] for _ in range(dist.get_world_size())]
        # bounded: every rank sends its list to all others
        dist.all_gather_object(everywhere, problems[: 4 * _NAMED_PROBLEMS], group=files_group())
    distinct = list(dict.fromkeys(problem for one in everywhere for problem in one))
    if len(distinct) > _NAMED_PROBLEMS:
        rest = len(distinct) - _NAMED_PROBLEMS
        distinct = [*distinct[:_NAMED_PROBLEMS], f"... and {rest} more tensors like these."]
    if distinct:
        raise ConfigError(distinct)


def save_hf_directory(
    weights: Iterator[NamedTensor], hf_checkpoint: str, path: str, *, quantization: Mapping[str, Any] | None = None
) -> None:
    """Write a Hugging Face checkpoint at ``path``. A collective: all ranks get the same ``weights`` and exhaust them.

    Up to ``_MAX_WRITERS`` ranks write files, each every so many of them. Ranks that do not see the directories of rank
    0 (on a disk of another host) write none. A writer holds two files in host memory.

    Args:
        hf_checkpoint: where configuration and tokenizer are copied from.
        quantization: see :func:`write_hf_directory`.

    Raises:
        SlimeError: a writer failed. Raised on all ranks.
    """
    rank, token = dist.get_rank(), [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0, group=files_group())
    partial = beside(path, "partial")

    def begin() -> None:
        _begin(hf_checkpoint, path)
        (partial / _TOKEN).write_text(token[0])

    def end() -> None:
        (partial / _TOKEN).unlink()
        checksums = {number: text for _, one in reports for number, text in one.items()}
        _end(path, name_shards(partial, files, checksums), quantization)

    _fail_together(path, do_on_first_rank(begin))
    sees: list[tuple[bool, str]] = [(False, "")] * dist.get_world_size()
    dist.all_gather_object(sees, (_has_token(partial, token[0]), _names_hash(hf_checkpoint)), group=files_group())
    writers = spread([number for number, one in enumerate(sees) if one == sees[0]], _MAX_WRITERS)
    files: list[dict[str, int]] = []
    mine: tuple[str | None, dict[int, str]]
    errors: list[Exception] = []
    with kept(errors):
        content = _with_remainder(weights, hf_checkpoint)
        files, checksums = write_shards(
            content, partial, _MAX_FILE_BYTES, is_mine=lambda number: writers[number % len(writers)] == rank
        )
        mine = None, checksums
    if errors:
        logger.error("rank %d: writing a Hugging Face checkpoint at %s failed", rank, path, exc_info=errors[0])
        mine = f"rank {rank}: {named(errors[0])}", {}
    for _ in weights:  # a writer that failed, too: the others wait for it at every tensor
        pass
    reports: list[tuple[str | None, dict[int, str]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(reports, mine, group=files_group())
    failures = [failure for failure, _ in reports if failure]
    failure = "; ".join(failures) or do_on_first_rank(end)
    if failure and rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    _fail_together(path, failure)


def _fail_together(path: str, failure: str | None) -> None:
    if failure is not None:
        raise SlimeError(f"--save-hf {path}: {failure}")


def _has_token(directory: Path, token: str) -> bool:
    try:
        return (directory / _TOKEN).read_text() == token
    except OSError:
        return False


def _names_hash(source: str) -> str:
    """A hash of the names of all tensors in ``source``. Empty if there are none, or their list is damaged."""
    try:
        names = TensorReader(source, "--hf-checkpoint").names
    except ConfigError:
        return ""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def write_hf_directory(
    weights: Iterable[NamedTensor],
    source: str,
    path: str,
    *,
    max_file_bytes: int | None = None,
    quantization: Mapping[str, Any] | None = None,
    num_writers: int = 1,
    config_path: str | None = None,
    keeps_rest: bool = True,
) -> None:
    """Write a complete Hugging Face checkpoint at ``path``, with every file of ``source`` that holds no weights.

    Tensors of ``source`` that ``weights`` does not hold (layers that were not built) are taken over unchanged, except
    a head that is tied to the embedding. Written beside the target and renamed at the end: ``path`` is never half a
    checkpoint. It replaces an earlier export only, and a failure leaves that one in place.

    Raises:
        ConfigError: ``path`` exists and is not an export, or it is ``source``.

    Args:
        quantization: quantization of ``weights`` for config.json. None: not quantized, whatever the source is.
        num_writers: files that are written at a time. They and the next one are held in memory.
        config_path: the config.json to write instead of that of ``source``.
        keeps_rest: False: only ``weights`` are written.
    """
    partial = _begin(source, path)
    with undone(lambda: shutil.rmtree(partial, ignore_errors=True)):
        if config_path is not None:
            shutil.copy2(config_path, partial / "config.json")
        written: Iterable[Content] = _with_remainder(weights, source) if keeps_rest else weights
        files, checksums = write_shards(written, partial, max_file_bytes or _MAX_FILE_BYTES, num_threads=num_writers)
        _end(path, name_shards(partial, files, checksums), quantization)


def _begin(source: str, path: str) -> Path:
    """Check the target, and make a directory beside it with the files of ``source`` that hold no weights."""
    target = Path(path)
    if target.resolve() == Path(source).resolve():
        raise ConfigError(f"--save-hf {path} is the same directory as --hf-checkpoint; name another one.")
    partial = begin_export(path)
    with undone(lambda: shutil.rmtree(partial, ignore_errors=True)):
        for file in Path(source).iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_FILES and file.name not in (INDEX, MARKER):
                shutil.copy2(file, partial / file.name)
    return partial


def _end(path: str, checksums: dict[str, str], quantization: Mapping[str, Any] | None) -> None:
    """Complete the directory that :func:`_begin` made, and give it its name."""
    _note_quantization(beside(path, "partial") / "config.json", quantization)
    finish_export(path, checksums)


def _with_remainder(weights: Iterable[NamedTensor], source: str) -> Iterator[Content]:
    written: set[str] = set()
    for name, tensor in weights:
        written.add(name.removesuffix(_PACKED))
        yield name, tensor
    if not any(Path(source).glob("*.safetensors")):
        return
    reader = TensorReader(source, "--hf-checkpoint")
    # a head that is not in weights is tied to the embedding: the source's would be the old one
    for name in sorted(reader.names - written - {"lm_head.weight"}):
        yield name, StoredTensor(reader.num_bytes(name), functools.partial(reader.get, name))


def _note_quantization(config: Path, quantization: Mapping[str, Any] | None) -> None:
    if not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    was_quantised = content.pop("quantization_config", None) is not None
    if quantization is not None:
        content["quantization_config"] = dict(quantization)
    if was_quantised or quantization is not None:
        config.write_text(json.dumps(content, indent=2), encoding="utf-8")
