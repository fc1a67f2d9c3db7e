"""Launch scripts in Python: convert a checkpoint, fetch a dataset, run a training command on Ray.

The counterpart of ``scripts/run-*.sh``, through the same shell functions (``scripts/lib``), so that both start and stop
Ray the same way. Needs a checkout of slime.
"""

from __future__ import annotations

import datetime
import os
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime.utils.misc import exec_command

__all__ = [
    "ExecuteTrainConfig",
    "convert_checkpoint",
    "create_run_id",
    "exec_command",
    "execute_train",
    "get_bool_env_var",
    "get_default_wandb_args",
    "hf_download_dataset",
]

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_DATASETS_DIR = str(Path("/root", "datasets"))
_MASTER_PORT = 23456


@dataclass
class ExecuteTrainConfig:
    """Settings that differ between machines.

    Attributes:
        cuda_core_dump: write a dump when a kernel fails.
        num_nodes: nodes of the job. Default: ``SLURM_JOB_NUM_NODES``, else 1.
        extra_env_vars: ``NAME=value`` words for every process.
    """

    cuda_core_dump: bool = False
    num_nodes: int = field(default_factory=lambda: int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], None] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run a driver as a job of Ray, which is started if none runs. ``SLIME_DRY_RUN=1`` prints the command instead.

    Args:
        train_args: flags, as one text for the shell.
        megatron_model_type: name of a preset in ``scripts/models``. None adds no model flags.
        before_ray_job_submit: called first.
        extra_env_vars: for every process of the job, besides those of ``config``.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    config = config or ExecuteTrainConfig()
    variables = dict(word.partition("=")[::2] for word in shlex.split(config.extra_env_vars)) | dict(
        extra_env_vars or {}
    )
    if config.cuda_core_dump:
        variables |= {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_SHOW_PROGRESS": "1"}
    lines = [f"source {_quoted('scripts', 'lib', 'launch.sh')}"]
    if megatron_model_type is not None:
        lines.append(f"source {_quoted('scripts', 'models', f'{megatron_model_type}.sh')}")
    lines.append(f"need_gpus {num_gpus_per_node * config.num_nodes}")
    lines += [f"JOB_ENV+=({shlex.quote(f'{name}={value}')})" for name, value in variables.items()]
    # train_args stays unquoted: it is shell text with quotes and variables of its caller
    lines.append(f"launch {shlex.quote(train_script)} {train_args}")
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    exec_command("\n".join(lines))


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = "/root",
    hf_checkpoint: str | None = None,
) -> None:
    """Convert a Hugging Face checkpoint to ``{dir_dst}/{model_name}_torch_dist``, unless that is there.

    Args:
        multinode: over the nodes of a Slurm job.
        hf_checkpoint: its directory. None: ``{dir_dst}/models/{model_name}`` if it exists, else
            ``{dir_dst}/{model_name}``.
    """
    # any content counts: an interrupted conversion must be deleted by hand
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if target.exists():
        print(f"{target} exists: nothing to convert")
        return
    below = Path(dir_dst) / "models" / model_name
    source = hf_checkpoint or str(below if below.exists() else Path(dir_dst) / model_name)
    nodes = ""
    if multinode:
        # ${...} is expanded by the shell of each node, not here
        nodes = (
            f"--nnodes=${{SLURM_JOB_NUM_NODES}} --node-rank=${{SLURM_NODEID}} --master-addr=${{MASTER_ADDR}} "
            f"--master-port={_MASTER_PORT} "
        )
    exec_command(
        f"source {_quoted('scripts', 'models', f'{megatron_model_type}.sh')}\n"
        f"PYTHONPATH={shlex.quote(str(REPOSITORY))} torchrun {nodes}--nproc-per-node={num_gpus_per_node} "
        f'{_quoted("tools", "convert_hf_to_torch_dist.py")} "${{MODEL_ARGS[@]}}" '
        f"--hf-checkpoint {shlex.quote(source)} --save {shlex.quote(str(target))} {extra_args}"
    )


def hf_download_dataset(full_name: str) -> None:
    """Fetch ``owner/name`` from the Hugging Face hub into ``SLIME_DATASETS_DIR/name``."""
    folder = Path(os.environ.get("SLIME_DATASETS_DIR", DEFAULT_DATASETS_DIR)) / full_name.rpartition("/")[2]
    exec_command(f"hf download --repo-type dataset {shlex.quote(full_name)} --local-dir {shlex.quote(str(folder))}")


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Flags for Weights & Biases. Empty without ``WANDB_API_KEY``."""
    # The key itself is not a flag: command lines are visible to all users of the host.
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    name = Path(test_file).stem
    group = "_".join(filter(None, (run_name_prefix, name, run_id or create_run_id())))
    return f"--use-wandb --wandb-project slime-{name} --wandb-group {shlex.quote(group)} "


def create_run_id() -> str:
    """``yymmdd-HHMMSS-NNN``."""
    return f"{datetime.datetime.now():%y%m%d-%H%M%S}-{random.randrange(1000):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Whether the environment variable is ``true`` (any case) or ``1``."""
    return os.environ.get(name, default).lower() in ("true", "1")


def _quoted(*parts: str) -> str:
    return shlex.quote(str(REPOSITORY.joinpath(*parts)))
