"""The log-prob server: Megatron ranks that score sequences over HTTP, such as those of a student for its teacher.

    this process   HTTP, queue                     slime.backends.megatron_utils.server.{app,queue}
    Ray actors     one per rank: model, passes     slime.backends.megatron_utils.server.scorer

A separate entry point: ``python -m slime.backends.megatron_utils.server.megatron_server``. It takes the flags of a
training run for the model, its weights and its division among devices. Other flags of a launch script may stay: they
have no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Mapping
from typing import Any

from slime.backends.megatron_utils.server.arguments import TeacherServerArgs, validate_megatron_server_args
from slime.backends.megatron_utils.server.megatron_server import ServedModel, make_app, serving, warm_up
from slime.backends.megatron_utils.server.queue import RoundSettings, Score, ScoreQueue, ScoreRequest
from slime.backends.training.arguments import CheckpointArgs, ParallelArgs
from slime.backends.training.checkpoint_source import find_start
from slime.batch.schedule import ParallelLayout
from slime.config.groups import from_args
from slime.models.hf_shape import read_shape
from slime.observability.logging_utils import configure_logger
from slime.observability.run_info import hide_secrets
from slime.ray.actor_group import RayTrainGroup
from slime.ray.arguments import parse_server_args
from slime.ray.placement_group import create_placement_groups, release_placement_groups
from slime.ray.run.cluster import running_cluster
from slime.ray.run.restart import exit_status
from slime.ray.train_actor import TrainActor
from slime.ray.watch import get
from slime.utils.errors import ConfigError, SlimeError

logger = logging.getLogger(__name__)


class ScoringActor(TrainActor):
    """Body of a rank's actor."""

    def score(self, micro_batches: list[list[ScoreRequest]]) -> list[list[Score]] | None:
        return self.trainer.score(micro_batches)  # type: ignore[attr-defined,no-any-return]  # a MegatronScorer

    def load(self, path: str) -> None:
        self.trainer.load(path)  # type: ignore[attr-defined]

    def rank_in_data_parallel(self) -> int:
        return self.trainer.data_parallel[0]


class ScoringGroup(RayTrainGroup):
    """All ranks, addressed as one. Every call blocks, and has a deadline."""

    _dp_ranks: list[int]

    def setup(self) -> None:
        """Build the model and load its weights, on all ranks."""
        refs, timeout_s = self.start_setup(with_ref=False), self._args.trainer_start_timeout
        get(refs, timeout_s, "the model", "--trainer-start-timeout", reports_work=True)
        what = "the ranks to say where they stand"
        self._dp_ranks = get(self._all("rank_in_data_parallel"), self._args.train_timeout, what)

    def score(self, by_dp_rank: list[list[list[ScoreRequest]]]) -> list[list[list[Score]]]:
        """Data-parallel rank -> micro-batches -> requests, and the same for the answers."""
        refs = [
            rank.score.remote(by_dp_rank[dp_rank]) for rank, dp_rank in zip(self.ranks, self._dp_ranks, strict=True)
        ]
        answers: list[list[list[Score]]] = [[] for _ in by_dp_rank]
        for dp_rank, answer in zip(
            self._dp_ranks, get(refs, self._args.train_timeout, "the scores", "--train-timeout"), strict=True
        ):
            if answer is not None:
                answers[dp_rank] = answer
        return answers

    def load(self, path: str, timeout_s: float) -> None:
        """Take the weights of a checkpoint, on all ranks."""
        get(self._all("load", path), timeout_s, f"the weights of {path} to be loaded", "timeout_s of the request")


async def _serve(queue: ScoreQueue, model: ServedModel, settings: TeacherServerArgs, start: str) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    asked_to_end = asyncio.Event()
    # Handlers instead of exceptions, so that the HTTP server closes before the ranks end.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_end.set)
    worker = asyncio.create_task(queue.work())
    end = asyncio.create_task(asked_to_end.wait())
    try:
        if settings.megatron_server_warmup:
            await warm_up(make_app(queue, model, settings), model.vocab_size, settings)
        async with serving(make_app(queue, model, settings), settings.teacher_host, settings.teacher_port):
            logger.info("log-probs of %s at http://%s:%d", start, settings.teacher_host, settings.teacher_port)
            await asyncio.wait([worker, end], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            await worker  # raises what ended it: a rank died
    finally:
        for task in (worker, end):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, SlimeError):
                await task


def _round_settings(world_size: int, parallel: ParallelArgs, tokens_per_gpu: int | None) -> RoundSettings:
    context, pipeline = parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    layout = ParallelLayout.of(
        world_size, tensor=parallel.tensor_model_parallel_size, pipeline=pipeline, context=context
    )
    return RoundSettings(
        max_tokens=(tokens_per_gpu or 0) * context,
        data_parallel_size=layout.dp_size,
        num_micro_batches=pipeline + 1,
        multiple=parallel.microbatch_group_size_per_vp_stage or 1,
    )


def _shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as JSON without secrets. Values that JSON cannot represent become text."""
    values = {name: hide_secrets(value, name) for name, value in arguments.items()}
    shown: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return shown


def main() -> None:
    """The command."""
    try:
        args = parse_server_args(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    configure_logger()
    for notice in args.notices:
        if notice.level == "warning":
            logger.warning("%s", notice)
    with exit_status(), running_cluster(args), contextlib.ExitStack() as started:
        validate_megatron_server_args(args)
        slots = create_placement_groups(args)
        started.callback(release_placement_groups, slots)
        group = ScoringGroup(args, slots["actor"], "scorer", ScoringActor)
        started.callback(group.kill)
        group.setup()
        settings = from_args(TeacherServerArgs, args)
        start = find_start(from_args(CheckpointArgs, args), args.hf_checkpoint).directory
        tokens = args.log_probs_max_tokens_per_gpu or args.max_tokens_per_gpu
        rounds = _round_settings(args.world_size, from_args(ParallelArgs, args), tokens)
        queue = ScoreQueue(group.score, group.load, rounds, start)
        vocab_size = read_shape(args.hf_checkpoint).vocab_size
        model = ServedModel(vocab_size, args.rollout_temperature, _shown(vars(args)))
        asyncio.run(_serve(queue, model, settings, start))


if __name__ == "__main__":
    main()
