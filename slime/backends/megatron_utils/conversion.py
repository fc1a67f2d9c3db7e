"""A model without a trainer, for the conversion tools and for users' scripts: in one process or under torchrun.

    read_options                    Megatron's flags (MODEL_ARGS of a preset), checked against --hf-checkpoint
    OfflineModel                    process groups, the model without an optimizer: load, export, save

    init                            process groups and seeds of a script that torchrun started
    get_model_provider_func         makes the parts of the model for this rank
    load_hf_weights                 fills them from safetensors files
    save_hf_model_direct_to_path    writes such files
    convert_to_hf, remove_padding   one whole tensor

The functions of the second list are the same steps with ``args`` alone. Their public names are in ``slime.compat``:
``initialize``, ``model_provider``, ``hf_to_megatron``, ``hf_checkpoint_saver``, ``megatron_to_hf`` and ``misc_utils``.
``args`` has Megatron's flags. The model is that of ``args.hf_checkpoint``.

Imports megatron only when a model is built, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from slime.algorithms import arguments as algorithm_arguments
from slime.backends.megatron_utils import argument_rules, arguments
from slime.backends.megatron_utils.model_rules import padded_vocab_size, sees_media
from slime.backends.megatron_utils.patches import install
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import Source, inspect_checkpoint
from slime.backends.training.hf_files import save_hf_directory
from slime.config.groups import RunConfig, defaults_of, from_args, groups_in, unsupported_flags, with_values
from slime.config.parse import UNKNOWN, EngineNamespace, parse
from slime.models.config_json import load_model_config, text_part
from slime.models.family import Rule, local_name
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError, SlimeError
from slime.utils.net import single_rank_environment

if TYPE_CHECKING:
    from slime.backends import NamedTensor
    from slime.backends.megatron_utils.checkpoint.state import TrainState

_SLURM_PORT = "23456"
_FLOATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def run_tool(main: Callable[[], None]) -> int:
    """Run a tool. Returns its exit status: 2, with every problem on stderr, if it cannot work."""
    try:
        main()
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_options(
    add_options: Callable[[argparse.ArgumentParser], None], description: str, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the tool's own options and Megatron's flags.

    Weights keep the precision of the Hugging Face checkpoint unless a flag says otherwise. Under torchrun without
    parallel sizes the processes become pipeline stages, as far as they divide the layers.

    Args:
        add_options: adds the tool's options, --hf-checkpoint (or another flag for it) among them.

    Raises:
        ConfigError: flags that are unknown, contradict --hf-checkpoint, or ask for what does not exist.
    """

    def prepare(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.prog, parser.description = os.path.basename(sys.argv[0]), description
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        add_options(parser)
        parser.usage = None
        own = parser.format_usage().removeprefix("usage: ").rstrip()
        parser.usage = f"{own} [Megatron flag ...]"
        return parser

    _adopt_slurm_step()
    groups = groups_in(arguments)
    args = parse(
        sys.argv[1:] if argv is None else argv,
        groups,
        read_engine=lambda tokens, known: EngineNamespace(rest=list(tokens)),
        add_arguments=prepare,
    )
    whole = load_model_config(args.hf_checkpoint)
    config = {**whole, **text_part(whole)}
    if not (args.bf16 or args.fp16 or args.fp32):
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        args = with_values(args, **{_FLOATS.get(dtype, "bf16"): True})
    # Rules of the trainer hold for tools too. They and the model's config read flags of the objective.
    absent = {name: value for name, value in defaults_of(groups_in(algorithm_arguments)).items() if name not in args}
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = with_values(args, **absent, debug_rollout_only=False, world_size=num_ranks)
    args = with_values(args, pipeline_model_parallel_size=_num_stages(from_args(ParallelArgs, args), num_ranks, config))
    for step in argument_rules.STEPS:
        step(args)
    # A misspelled shape would be converted wrongly: here it is no warning as in a run.
    problems = [f"{notice}." for notice in args.notices if notice.text.startswith(UNKNOWN)]
    problems += unsupported_flags(args, groups)
    for rule in argument_rules.RULES:
        problems += rule(args)
    if problems:
        raise ConfigError(problems)
    for notice in args.notices:
        if notice.level == "warning":
            print(notice, file=sys.stderr)
    return args


def _adopt_slurm_step() -> None:
    """Make the tasks of ``srun`` the ranks, as those of torchrun.

    Raises:
        ConfigError: ``MASTER_ADDR`` does not name the node of the first task.
    """
    given = os.environ
    if "WORLD_SIZE" in given or "SLURM_STEP_ID" not in given or int(given.get("SLURM_NTASKS", "1")) == 1:
        return
    if "MASTER_ADDR" not in given:
        raise ConfigError(
            f"srun started {given['SLURM_NTASKS']} tasks (SLURM_NTASKS), and each would convert alone: set MASTER_ADDR "
            "to the node of the first task, or use torchrun."
        )
    given.update(RANK=given["SLURM_PROCID"], WORLD_SIZE=given["SLURM_NTASKS"], LOCAL_RANK=given["SLURM_LOCALID"])
    given.setdefault("MASTER_PORT", _SLURM_PORT)


def _num_stages(sizes: ParallelArgs, num_ranks: int, config: dict[str, Any]) -> int:
    """As many pipeline stages as there are ranks, if they divide the layers and no flag chooses a layout."""
    stages = sizes.pipeline_model_parallel_size
    others = (sizes.tensor_model_parallel_size, sizes.context_parallel_size, sizes.expert_model_parallel_size)
    if max(stages, *others) > 1:
        return stages
    stages = num_ranks
    layers = int(config.get("num_hidden_layers") or 1)  # a rule reports a model without layers
    while layers % stages or num_ranks % stages:
        stages -= 1
    return stages


def _has_tower(flag: str, path: str) -> bool:
    install()
    from slime.backends.megatron_utils.checkpoint.shard_files import load_common
    from slime.backends.training.checkpoint_source import DAMAGE, unreadable

    source = inspect_checkpoint(flag, path)
    if source is None:
        return False  # load_torch_dist reports it
    try:
        content = load_common(source.directory)
    except FileNotFoundError:
        return False  # as above
    except DAMAGE as error:
        raise unreadable(source, error) from None
    return bool(content.get("model_shape", {}).get("vision"))


class OfflineModel:
    """This process's part of the model that ``--hf-checkpoint`` describes, as a context manager.

    Args:
        reads: flag and path of the Megatron checkpoint to be read, which has a vision tower or has none.
    """

    def __init__(self, run: RunConfig, *, reads: tuple[str, str] | None = None) -> None:
        self._run, self._hf_checkpoint = run, run.values["hf_checkpoint"]
        with_vision = sees_media(run.args) or (reads is not None and _has_tower(*reads))
        self.shape = read_shape(self._hf_checkpoint, with_vision=with_vision)
        self._state: TrainState | None = None

    def __enter__(self) -> OfflineModel:
        if "WORLD_SIZE" not in os.environ:  # not started by torchrun: alone
            os.environ.update(single_rank_environment())
        install()
        from slime.backends.megatron_utils.process_groups import init_distributed
        from slime.backends.megatron_utils.setup import build_model_state

        init_distributed(self._run[ParallelArgs], self._run[TrainerArgs])
        self._state = build_model_state(self._run, self.shape)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch.distributed as dist

        self._state = None
        if kind is None and dist.is_initialized():  # after an error the other ranks may not come to this point
            from slime.backends.megatron_utils.process_groups import destroy_distributed

            destroy_distributed()

    @property
    def is_main(self) -> bool:
        return os.environ["RANK"] == "0"

    def load_hf(self) -> None:
        from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights

        load_weights(self._ready.model, self.shape, self._hf_checkpoint, "--hf-checkpoint")

    def load_torch_dist(self, flag: str, path: str) -> Source:
        """Weights of the checkpoint at ``path``: an iteration's directory, or one with a tracker file."""
        from slime.backends.megatron_utils.checkpoint.state import load_model_weights
        from slime.backends.training.checkpoint_source import verify_source

        source = inspect_checkpoint(flag, path)
        if source is None or source.format != "torch_dist":
            raise ConfigError(f"{flag} {path} is not a Megatron checkpoint.")
        verify_source(source)
        load_model_weights(self._ready.model, self.shape, source)
        return source

    def export(self) -> Iterator[NamedTensor]:
        from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

        return export_weights(self._ready.model, self.shape, layout_of=self._hf_checkpoint)

    def save_release(self, root: str) -> None:
        """Write ``<root>/release``, weights only."""
        from slime.backends.megatron_utils.checkpoint.state import CheckpointContent
        from slime.backends.megatron_utils.checkpoint.writer import CheckpointWriter

        content = CheckpointContent(has_optimizer=False, has_rng=False)
        CheckpointWriter(root).save(self._ready, self.shape, self._run.values, 0, content, name="release")

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "used outside its with block"
        return self._state


_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def init(args: Namespace) -> None:
    """Initialize process groups and seeds from the environment variables of torchrun."""
    install()  # before any import of megatron, which is why such imports are inside functions
    from slime.backends.megatron_utils.process_groups import init_distributed

    init_distributed(from_args(ParallelArgs, args), from_args(TrainerArgs, args))


def get_model_provider_func(args: Namespace, role: str = "actor") -> Callable[..., torch.nn.Module]:
    """A function that makes this rank's part of the model, without weights. Call it after :func:`init`.

    Its parameters are those that Megatron's ``get_model`` passes. ``pre_process`` and ``post_process`` are ignored:
    they follow from the rank.

    Args:
        role: ``actor``, or ``critic`` for a model with a value head.
    """
    if role not in ("actor", "critic"):
        raise ConfigError(f"role {role!r} must be actor or critic.")

    def provide(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
    ) -> torch.nn.Module:
        from slime.backends.megatron_utils.model.build import build_model
        from slime.backends.megatron_utils.model.gpt import add_value_head
        from slime.backends.megatron_utils.transformer_config import build_config

        shape = _shape(args)
        if role == "critic":
            shape = replace(shape, is_tied=False)  # a value head replaces the output layer
        config = build_config(RunConfig.of(args), shape)
        padded = padded_vocab_size(args, shape)
        model = build_model(shape, config, padded_vocab_size=padded, vp_stage=vp_stage)
        if role == "critic":
            add_value_head([model], init_std=args.init_method_std, seed=args.seed)
        return model

    return provide


def load_hf_weights(args: Namespace, model: Any, path: str | Path) -> None:
    """Fill ``model``, or the chunks of a list, from the safetensors files in ``path``. A collective.

    Raises:
        ConfigError: files and model do not fit. Lists every tensor that is missing, unknown or misshapen.
    """
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights

    load_weights(model, _shape(args), str(path), "path")


def save_hf_model_direct_to_path(
    args: Namespace,
    output_dir: str | Path,
    model: Any,
    *,
    model_name: str | None = None,
    quantization_config: dict[str, Any] | None = None,
    progress_desc: str = "Save HF checkpoint",
) -> None:
    """Write ``model`` as a Hugging Face checkpoint, with the configuration and tokenizer of ``args.hf_checkpoint``.

    A collective. Several ranks write.

    Args:
        model_name: ignored. The family is that of ``args.hf_checkpoint``.
        quantization_config: must be None.
        progress_desc: ignored.
    """
    _refuse_quantization(quantization_config)
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

    source = args.hf_checkpoint
    weights = export_weights(model, _shape(args), layout_of=source)
    save_hf_directory(weights, source, str(output_dir))


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: torch.Tensor,
    quantization_config: dict[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors inside one whole Megatron tensor, with their names.

    All experts of a layer may be one tensor, as in the model.

    Args:
        model_name: ignored. The family is that of ``args.hf_checkpoint``.
        name: of the tensor in a model of local or Transformer Engine's layers, with or without ``module.`` before it.
            Layers and experts count over the whole model.
        param: the whole tensor, not the part of a rank.
        quantization_config: must be None.
        transform_ue8m0: ignored, as it belongs to ``quantization_config``.

    Raises:
        ConfigError: the family has no tensor of that name.
    """
    _refuse_quantization(quantization_config)
    install()
    from slime.backends.megatron_utils.checkpoint.tensors import dimensions_of, from_megatron
    from slime.backends.megatron_utils.model.experts import experts_of
    from slime.backends.megatron_utils.transformer_config import build_config

    shape = _shape(args)
    size = dimensions_of(build_config(RunConfig.of(args), shape), shape.vocab_size)
    found: list[tuple[str, torch.Tensor]] = []
    num_experts = None if shape.moe is None else shape.moe.num_experts
    for single, tensor in experts_of(local_name(strip_param_name_prefix(name)), param, num_experts):
        rule, numbers = _rule(shape, single)
        parts = from_megatron(tensor, rule, size)
        found += [(hf.format(**numbers), part) for hf, part in zip(rule.hf, parts, strict=True)]
    return found


def _rule(shape: ModelShape, name: str) -> tuple[Rule, dict[str, int]]:
    for rule in shape.family.rules:
        if found := _pattern(rule).fullmatch(name):
            numbers = {key: int(value) for key, value in found.groupdict().items()}
            if "mtp" in numbers:
                numbers["mtp_layer"] = shape.num_layers + numbers["mtp"]
            return rule, numbers
    raise ConfigError(f"{name}: models of model_type {shape.model_type} have no such tensor.")


def convert_tensor_to_hf(args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """:func:`convert_to_hf` under the public names of the families. The family is that of ``args.hf_checkpoint``."""
    return convert_to_hf(args, "", name, param)


def _shape(args: Namespace) -> ModelShape:
    return read_shape(args.hf_checkpoint, with_vision=sees_media(args))


def _pattern(rule: Rule) -> re.Pattern[str]:
    # re.escape has put a backslash before each brace.
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(rule.megatron)))


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``param`` without padding rows of the vocabulary, if it is the embedding or the head."""
    return param[:vocab_size] if strip_param_name_prefix(name) in _PADDED else param


def strip_param_name_prefix(name: str) -> str:
    """A parameter's name without the ``module.`` prefixes of the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _refuse_quantization(config: dict[str, Any] | None) -> None:
    if config is not None:
        raise ConfigError(
            "quantization_config must be None: weights are quantized on their way to the engines (slime.weight_sync), "
            "checkpoints by tools/convert_hf_to_fp8.py and tools/convert_hf_to_int4_direct.py."
        )
