"""Adapters on disk: peft's directory, written and read, and the proof that it belongs to the base of the run.

    <directory>/adapter_config.json          settings of peft
    <directory>/adapter_model.safetensors    the tensors. Its metadata has the fingerprint of the base

Both trainers and the rules before a start use it. Torch is imported only to write.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime.backends import NamedTensor
from slime.backends.training.checkpoint_files import checksums_of, read_manifest
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.hf_export import begin_export, finish_export
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig, adapter_tensors
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError, SlimeError

ADAPTER = "adapter"
"""Key of :func:`describe_adapter` in the content of a checkpoint's manifest."""

_BASE = "slime_base"
_NUM_SAMPLES, _SAMPLE_BYTES = 128, 4096
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Settings of peft with which an adapter is another function than that of this trainer.
_UNSUPPORTED = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "target_parameters"),
    *("trainable_token_indices", "lora_bias", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "kasa_config"),
)
# These ways to begin take a part of the base away.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_NAMED = 3


def base_fingerprint(hf_checkpoint: str) -> str:
    """A hash of the names, types and shapes of all tensors, and of the bytes of some. Empty without safetensors files.

    It does not depend on the division into files. It has bytes of every tensor whose name without numbers fewer than
    128 tensors share, such as one weight of each layer, and of 128 others of each such name, such as experts. Thus
    changes of one kind of layer are seen in a model of any size.
    """
    kinds: dict[str, list[tuple[str, str, list[int], Path, int, int]]] = {}
    for file in sorted(Path(hf_checkpoint).glob("*.safetensors")):
        header, begin = _header(file)
        header.pop("__metadata__", None)
        for name, one in header.items():
            low, high = one["data_offsets"]
            entry = name, one["dtype"], one["shape"], file, begin + low, high - low
            kinds.setdefault(_NUMBER.sub("*", name), []).append(entry)
    if not kinds:
        return ""
    alike = [sorted(entries, key=lambda entry: entry[0]) for _, entries in sorted(kinds.items())]
    digest = hashlib.sha256(json.dumps([entry[:3] for entries in alike for entry in entries]).encode())
    for entries in alike:
        for _, _, _, file, begin, size in entries[:: -(-len(entries) // _NUM_SAMPLES)]:
            with file.open("rb") as stream:
                stream.seek(begin + size // 2)
                digest.update(stream.read(min(_SAMPLE_BYTES, size - size // 2)))
    return digest.hexdigest()


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """(tensors by name, position of the first byte of data) of a safetensors file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as a safetensors file: {error}") from None
    return header, 8 + length


def describe_adapter(lora: LoraConfig, shape: ModelShape, hf_checkpoint: str) -> dict[str, Any]:
    """The adapters and their base as plain values, for the manifest of a checkpoint."""
    settings = {name: asdict(lora)[name] for name in ("rank", "alpha", "rslora", "experts")}
    return {**settings, "target_modules": lora.module_names(shape), "base": base_fingerprint(hf_checkpoint)}


def shared_description(lora: LoraConfig, shape: ModelShape, hf_checkpoint: str) -> dict[str, Any]:
    """:func:`describe_adapter` on all ranks. A collective: rank 0 reads the base.

    Raises:
        ConfigError: the base cannot be read. Raised on all ranks.
    """
    import torch.distributed as dist

    from slime.utils.distributed_utils import do_on_first_rank, files_group

    described: list[dict[str, Any]] = [{}]
    failure = do_on_first_rank(lambda: described[0].update(describe_adapter(lora, shape, hf_checkpoint)))
    if failure is not None:
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: {failure}")
    dist.broadcast_object_list(described, src=0, group=files_group())
    return described[0]


def state_problems(source: Source, current: Mapping[str, Any] | None) -> list[str]:
    """Why a run with the adapters ``current`` cannot continue the training state ``source``."""
    try:
        manifest = read_manifest(Path(source.directory))
    except (ValueError, TypeError):  # reported with the damage
        return []
    saved = None if manifest is None else manifest.content.get(ADAPTER)
    where = f"{source.flag} {source.directory}"
    if saved is None and current is None:
        return []
    if not isinstance(saved, Mapping):
        return [
            f"{where} was saved without adapters, so --lora-rank cannot continue it: make an export of it (--save-hf) "
            "the --hf-checkpoint, and drop --load."
        ]
    if current is None:
        return [
            f"{where} holds adapters of rank {saved.get('rank')} and not their base: give --lora-rank "
            f"{saved.get('rank')} and the other settings of that run."
        ]
    if saved.get("base") != current["base"]:
        return [
            f"{where} holds adapters of another base than --hf-checkpoint: its weights have changed since, or it is "
            "another model. Give the --hf-checkpoint of that run."
        ]
    return [
        f"{where} was saved with {name} {saved.get(name)} of its adapters, but this run has {value}: settings of "
        "adapters cannot change in a resumed run."
        for name, value in current.items()
        if saved.get(name) != value
    ]


def read_adapter(directory: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of ``adapter_config.json``, and the header of ``adapter_model.safetensors``.

    Raises:
        ConfigError: the directory, which ``where`` describes, lacks them, or they are damaged.
    """
    try:
        config = json.loads((Path(directory) / CONFIG_FILE).read_text(encoding="utf-8"))
        header, _ = _header(Path(directory) / WEIGHTS_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} is not the directory of a peft adapter ({CONFIG_FILE}, {WEIGHTS_FILE}): {error}."
        ) from None
    return config, header


def settings_problems(config: Mapping[str, Any], where: str) -> list[str]:
    """Why an adapter with this ``adapter_config.json`` computes something else than ``W x + scale B (A x)``."""
    if config.get("peft_type") != "LORA":
        return [f"{where}: {CONFIG_FILE} has peft_type {config.get('peft_type')}; only LORA can be computed."]
    problems = [
        f"{where}: {CONFIG_FILE} has {name} {config[name]}, which is not computed."
        for name in _UNSUPPORTED
        if config.get(name)
    ]
    if config.get("bias", "none") != "none":
        problems.append(f"{where}: {CONFIG_FILE} has bias {config['bias']}; only adapters without biases are computed.")
    if str(begun := config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        problems.append(
            f"{where}: {CONFIG_FILE} has init_lora_weights {begun}, which has changed the base: convert the adapter "
            "with path_initial_model_for_weight_conversion of peft's save_pretrained."
        )
    return problems


def base_problems(metadata: Mapping[str, str], where: str, flag: str, hf_checkpoint: str) -> list[str]:
    """Why an adapter with this metadata of ``WEIGHTS_FILE`` does not belong to ``hf_checkpoint``, given by ``flag``."""
    base = metadata.get(_BASE)
    if base in (None, base_fingerprint(hf_checkpoint)):
        return []
    return [f"{where} is an adapter of another base than {flag} {hf_checkpoint}: give the same base."]


def adapter_problems(lora: LoraConfig, shape: ModelShape, hf_checkpoint: str) -> list[str]:
    """Why training cannot start from ``lora.adapter_path``."""
    where = f"--lora-adapter-path {lora.adapter_path}"
    try:
        config, header = read_adapter(str(lora.adapter_path), where)
    except ConfigError as error:
        return error.problems
    problems = settings_problems(config, where)
    for key, flag, value in (
        ("r", "--lora-rank", lora.rank),
        ("lora_alpha", "--lora-alpha", lora.alpha),
        ("use_rslora", "--lora-use-rslora", lora.rslora),
    ):
        if config.get(key, False) != value:
            problems.append(f"{where} was trained with {key} {config.get(key)}, but {flag} is {value}: give the same.")
    return problems or _tensor_problems(where, header, lora, shape, hf_checkpoint)


def _tensor_problems(
    where: str, header: dict[str, Any], lora: LoraConfig, shape: ModelShape, hf_checkpoint: str
) -> list[str]:
    if problems := base_problems(header.pop("__metadata__", {}), where, "--hf-checkpoint", hf_checkpoint):
        return problems
    needed = {FILE_PREFIX + name: list(sizes) for name, sizes in adapter_tensors(shape, lora).items()}
    has = {name: one["shape"] for name, one in header.items()}
    wrong = [name for name in needed if name in has and has[name] != needed[name]]
    if wrong:
        return [
            f"{where} is an adapter of another base than --hf-checkpoint {hf_checkpoint}: {wrong[0]} has shape "
            f"{has[wrong[0]]}, and {len(wrong)} of {len(needed)} tensors do not fit. It must have {needed[wrong[0]]}."
        ]
    missing, unknown = sorted(needed.keys() - has.keys()), sorted(has.keys() - needed.keys())
    named = [f"lacks {', '.join(missing[:_NAMED])}"] if missing else []
    named += [f"holds {', '.join(unknown[:_NAMED])}"] if unknown else []
    return [
        f"{where} {one}, which does not fit --lora-target-modules and --hf-checkpoint {hf_checkpoint}: give its "
        "targets and its base."
        for one in named
    ]


def save_adapter(
    weights: Iterable[NamedTensor], lora: LoraConfig, shape: ModelShape, hf_checkpoint: str, path: str
) -> None:
    """Write peft's directory at ``path``. A collective: rank 0 gets all adapters, holds them in host memory and writes.

    Raises:
        SlimeError: rank 0 failed. Raised on all ranks.
    """
    from slime.utils.distributed_utils import do_on_first_rank

    tensors = {FILE_PREFIX + name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
    failure = do_on_first_rank(lambda: _write(tensors, lora.peft_config(shape, hf_checkpoint), hf_checkpoint, path))
    if failure is not None:
        raise SlimeError(f"--save-hf {path}: {failure}")


def _write(tensors: Mapping[str, Any], config: Mapping[str, Any], hf_checkpoint: str, path: str) -> None:
    from safetensors.torch import save_file

    partial = begin_export(path)
    metadata = {"format": "pt", _BASE: base_fingerprint(hf_checkpoint)}
    save_file(dict(tensors), partial / WEIGHTS_FILE, metadata=metadata)
    (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    finish_export(path, checksums_of([partial / WEIGHTS_FILE]))
