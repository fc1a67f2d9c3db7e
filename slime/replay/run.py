"""One sample again: generated from the recording, scored by the run's reward, trained on by the run's objective.

    record of the run ──▶ prompt ──▶ generate_and_rm_group ──▶ compile ──▶ one trainer in this process ──▶ loss
                          siblings: as recorded, for the normalisation of rewards, without a part in the loss

Everything runs in the main thread, and the user's functions are those that the run's command line names.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data.columns import TrainData, column
from slime.data.sample import Sample, iter_samples
from slime.observability.run_info import RunInfo
from slime.observability.sample_record import read_rows, record_file, sample_of_row
from slime.utils.errors import ConfigError, DataError
from slime.utils.net import free_port

__all__ = ["Recorded", "Replayed", "generate", "load_recorded", "replay_args", "train"]

_ONE_PROCESS = (
    *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--tensor-model-parallel-size", "1"),
    *("--pipeline-model-parallel-size", "1", "--context-parallel-size", "1", "--expert-model-parallel-size", "1"),
    *("--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--record-samples", "0"),
)
_OF_MANY_PROCESSES = frozenset(
    (
        *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
        *("--microbatch-group-size-per-virtual-pipeline-stage", "--num-distributed-optimizer-instances"),
        *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--expert-tensor-parallel-size"),
        *(
            "--rollout-external-engine-addrs",
            "--sglang-config",
            "--prefill-num-servers",
            "--sglang-enable-dp-attention",
        ),
        *("--sglang-tp-size", "--sglang-tensor-parallel-size", "--sglang-pp-size", "--sglang-pipeline-parallel-size"),
        *("--sglang-dp-size", "--sglang-data-parallel-size", "--sglang-ep-size", "--sglang-expert-parallel-size"),
    )
)
"""Flags that make no sense for one process, and that no other value would undo."""
_PATIENCE_S = 86_400.0
"""A person may sit at a breakpoint."""


@dataclass(frozen=True)
class Recorded:
    """A sample and its group as the run left them.

    Attributes:
        group: the samples of its prompt, in order; as many as were recorded.
        place: of the sample in the group.
        version: newest weights that wrote into it, None where no engine said.
    """

    group: list[Sample]
    place: int
    version: int | None

    @property
    def sample(self) -> Sample:
        return self.group[self.place]


@dataclass(frozen=True)
class Replayed:
    """What came out.

    Attributes:
        group: with the sample generated again in place of the recorded one.
        samples: the rows that its execution made; one, unless the run's generate function makes several.
    """

    group: list[Any]
    samples: list[Sample]


def load_recorded(run: Path, rollout: int, position: int) -> Recorded:
    """Raises DataError for what is not recorded."""
    path = record_file(run, "rollout", rollout)
    if not path.is_file():
        raise DataError(f"{run}: rollout {rollout} is not recorded (--record-samples).")
    rows = read_rows(path)
    chosen = next((row for row in rows if row["position"] == position), None)
    if chosen is None:
        raise DataError(f"{path} holds samples 0 to {len(rows) - 1}, not {position}.")
    mates = [row for row in rows if row["group_index"] == chosen["group_index"] and row["group_index"] is not None]
    mates = mates or [chosen]
    versions = [int(version) for version in chosen["weight_versions"] or [] if version.isdecimal()]
    return Recorded([sample_of_row(row) for row in mates], mates.index(chosen), max(versions, default=None))


def replay_args(info: RunInfo, version: int | None, hf_checkpoint: str | None = None) -> tuple[Namespace, str]:
    """The run's arguments for one process.

    Returns:
        The arguments, and where the trainer's weights come from.

    Raises:
        ConfigError: the command line does not work any more.
    """
    from slime.ray.arguments import parse_only

    if os.path.isdir(info.cwd):
        os.chdir(info.cwd)  # relative paths of the command line belong there
    weights, words = _weights(info, version, hf_checkpoint)
    argv = [*_without(info.argv, _OF_MANY_PROCESSES), *_ONE_PROCESS, *words]
    args, problems = parse_only(argv, is_async=False)
    if args is None or problems:
        raise ConfigError(problems)
    return args, weights


def _without(argv: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """The words of a command line but for these flags and the words behind them, which are their values."""
    is_dropped = False
    for word in argv:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in flags
        if not is_dropped:
            yield word


def _weights(info: RunInfo, version: int | None, hf_checkpoint: str | None) -> tuple[str, list[str]]:
    """Where the weights that generated the sample are: its checkpoint, if the run kept it, else what it began with."""
    if hf_checkpoint is not None:
        return hf_checkpoint, ["--load", hf_checkpoint]
    save = info.settings.get("save")
    if version and save and (Path(save) / f"iter_{version - 1:07d}").is_dir():
        return f"{save}, rollout {version - 1}", ["--load", save, "--ckpt-step", str(version - 1), "--finetune"]
    began = str(info.hf_checkpoint)
    note = f"{began}; those of version {version} are not on disk, so the loss differs" if version else began
    return note, ["--load", began]


def generate(args: Namespace, recorded: Recorded) -> Replayed:
    """Generate and score the sample with the run's functions and recorded replies.

    Raises:
        SlimeError: the generate function or the reward raised, or asks for something that is not in the recording.
    """
    from slime.data.chat import load_tokenizer
    from slime.replay.recorded_engine import Recording, serving
    from slime.rollout import sglang_rollout
    from slime.rollout.failures import is_given_up, without_response
    from slime.utils.http_utils import init_http_client

    fresh = without_response(recorded.sample)
    fresh.tokens = []
    fresh.reward = None
    group: list[Any] = list(recorded.group)
    group[recorded.place] = fresh
    args.max_sample_retries = 0
    args.rm_timeout = args.rollout_request_timeout = _PATIENCE_S
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    with serving(Recording(recorded.sample, tokenizer)) as (host, port):
        args.sglang_router_ip, args.sglang_router_port = host, port
        args.sglang_model_routers = {"default": (host, port)}
        init_http_client(args)
        params = sglang_rollout.GenerateState(args).sampling_params.copy()
        made = asyncio.run(sglang_rollout.generate_and_rm_group(args, group, params))
    samples = list(iter_samples([made[recorded.place]]))
    for sample in samples:
        if is_given_up(sample):
            raise DataError(sample.metadata["failure"]["message"])
    return Replayed(made, samples)


def _rows(data: TrainData, places: Sequence[int]) -> TrainData:
    """The batch of these rows alone; their rewards are normalised already."""
    num = len(data["tokens"])
    is_row = {name: column(name).per == "sample" and len(values) == num for name, values in data.items()}
    return {name: [values[p] for p in places] if is_row[name] else values for name, values in data.items()}


def train(args: Namespace, replayed: Replayed, rollout: int) -> tuple[dict[str, float], dict[str, float]]:
    """One training step of one process on the replayed sample; its siblings only normalise its reward.

    Returns:
        Metrics of the step, and means over the sample.
    """
    from slime.batch.compile import compile_train_data
    from slime.batch.rewards import RewardArgs
    from slime.batch.schedule import MicroBatchArgs
    from slime.batch.ship import split_by_dp
    from slime.config.groups import from_args
    from slime.config.resolve.paths import needs_reference
    from slime.data.layout import ParallelLayout
    from slime.hooks.load import load_function
    from slime.ray.train_actor import trainer_class

    if args.use_critic:
        raise ConfigError(
            f"--advantage-estimator {args.advantage_estimator}: a replay has no critic, so there is no loss; use "
            "--no-train."
        )
    hooks = (args.custom_reward_post_process_path, args.custom_convert_samples_to_train_data_path)
    post_process, convert = (None if path is None else load_function(path) for path in hooks)
    data = compile_train_data(
        [replayed.group], rewards=from_args(RewardArgs, args), post_process=post_process, convert=convert, args=args
    )
    places = [i for i, row in enumerate(iter_samples(replayed.group)) if any(row is own for own in replayed.samples)]
    data = _rows(data, places)
    shipment = split_by_dp(
        data,
        layout=ParallelLayout(dp_size=1),
        global_batch_size=len(set(data["rollout_ids"])),
        settings=from_args(MicroBatchArgs, args),
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    args.num_rollout = args.num_rollout or rollout + 1
    make = trainer_class(args, "actor")
    trainer = make(args, rank=0, world_size=1, with_ref=needs_reference(args))
    trainer.setup()
    report = trainer.train(rollout, shipment.ranks[0])
    return report.steps[-1], report.rollout
