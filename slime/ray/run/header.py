"""The first lines of a run on the terminal: what runs, on what, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

from slime.models.cost import num_parameters
from slime.models.hf_shape import read_shape
from slime.observability.console import counted, joined, shown_path
from slime.observability.logging_utils import LOG_FILE
from slime.observability.terminal import TERMINAL
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from slime.utils.prompt_sources import parse_sources


@dataclass(frozen=True)
class HeaderArgs:
    """The arguments that the header shows."""

    advantage_estimator: str = ""
    debug_rollout_only: bool = False
    debug_train_only: bool = False
    fp16: bool = False
    fp32: bool = False
    hf_checkpoint: str | None = None
    is_async: bool = False
    loss_type: str = "policy_loss"
    prompt_data: str | None = None
    rollout_external: bool = False
    rollout_num_gpus: int = 0
    rollout_num_gpus_per_engine: int = 1
    world_size: int = 0

    @property
    def objective(self) -> str:
        if self.debug_rollout_only:
            return "samples only"
        names = {"sft_loss": "sft", "custom_loss": "custom loss"}
        return names.get(self.loss_type, self.advantage_estimator)

    @property
    def task(self) -> str | None:
        if self.prompt_data is None:
            return None
        sources = parse_sources(self.prompt_data)
        return " + ".join(source.name or PurePath(source.path.partition("@")[0]).stem for source in sources)

    @property
    def model(self) -> str | None:
        if self.hf_checkpoint is None:
            return None
        name = PurePath(self.hf_checkpoint).name
        # Local: rich, which "count" comes with, is imported for commands that print tables only.
        from slime.config.plan.render import count

        try:
            shape = read_shape(self.hf_checkpoint)
            name += f" ({shape.model_type}, {count(num_parameters(shape))})"
        except ConfigError:  # only transformers knows the model (--train-backend fsdp)
            pass
        return f"{name} {'fp32' if self.fp32 else 'fp16' if self.fp16 else 'bf16'}"

    @property
    def processes(self) -> str:
        parts = []
        if self.rollout_external:
            parts.append("external engines")
        elif not self.debug_train_only:
            parts.append(counted(max(1, self.rollout_num_gpus // self.rollout_num_gpus_per_engine), "engine"))
        if not self.debug_rollout_only:
            parts.append(counted(self.world_size, "trainer rank"))
        return f"{' + '.join(parts)}, {'CPU' if accelerator.current().is_cpu else 'GPU'}"


def print_header(shown: HeaderArgs, run: Path) -> None:
    """Write the lines, before anything starts."""
    command = "slime train-async" if shown.is_async else "slime train"
    task = None if shown.task is None else f"task {shown.task}"
    about = (command, run.name, task, shown.objective, shown.model, shown.processes)
    folder = shown_path(run)
    places = (f"folder {folder}", f"board: slime board {folder}", f"full log: {shown_path(run / LOG_FILE)}")
    for line in (*joined(filter(None, about), TERMINAL.width), *joined(places, TERMINAL.width)):
        TERMINAL.line(line)
