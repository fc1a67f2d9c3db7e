"""Executes a recorded schedule: ``--rollout-function-path slime.rollout.scheduled_rollout.generate_rollout``.

``--replay-schedule FILE`` is the ``schedule.jsonl`` of a deterministic run (``slime.data.schedule``). Weights of
version v generate every part of a response that they generated in that run, also for batches of later rollouts. So the
order of events does not depend on time: the loop is that of ``train.py``, and an asynchronous run ends with the same
weights. A part that did not end its response gets its recorded length as a limit, the last part ends by itself.

Started by ``slime replay RUN --all`` and ``slime branch``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.data.schedule import Planned, note_part, parts_of, read_begun, read_schedule
from slime.rollout.base_types import RolloutFnTrainOutput, complete_args
from slime.rollout.collect import BatchHooks, gather, log_sample
from slime.rollout.custom_generate import FINISHED, evaluates, until_finished
from slime.rollout.failures import give_up, is_given_up
from slime.rollout.rm_hub import score, score_group
from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm, generate_and_rm_group, seeded
from slime.utils.async_utils import call_in_thread, run
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_utils import init_http_client
from slime.utils.misc import group_by

_FLAG = "--replay-schedule"


class Replay:
    """The groups of a schedule that are not trained on yet.

    Args:
        first: first rollout of this run.
    """

    def __init__(self, args: Namespace, first: int) -> None:
        self.args = args
        self.path = args.replay_schedule
        self._first = first
        self._groups: dict[int, SampleGroup] = {}
        batches = read_schedule(Path(self.path))
        self._known = f"{min(batches)} to {max(batches)}" if batches else "none"
        self._batches = {rollout: self._by_group(rows) for rollout, rows in batches.items() if rollout >= first}
        self._plans = {number: plan for batch in self._batches.values() for number, plan in batch.items()}
        self._due: dict[int, list[int]] = defaultdict(list)
        for number, rows in self._plans.items():
            for version in _versions(rows):
                self._due[version].append(number)
        self._begun = read_begun(Path(self.path))

    def _by_group(self, rows: Sequence[Planned]) -> dict[int, list[Planned]]:
        if any(row.group is None for row in rows):
            raise DataError(
                f"{_FLAG} {self.path} has samples without a group: their rollout function did not draw them from the "
                "data source. Only groups of the data source can be made again."
            )
        return group_by(rows, lambda row: row.group)

    async def batch(self, rollout_id: int, data_source: Any) -> list[SampleGroup]:
        """Generate all that the present weights generated, and return the rollout's batch.

        The weights that serve are those of version ``rollout_id``.
        """
        plan = self._batches.pop(rollout_id, None)
        if plan is None:
            raise DataError(
                f"{_FLAG} {self.path} has no rollout {rollout_id}, its rollouts are {self._known}: start with the "
                "checkpoint before the first one, and with --num-rollout up to the last one."
            )
        newest = {number: max(_versions(rows), default=-1) for number, rows in plan.items()}
        if missing := [number for number, version in newest.items() if version > rollout_id]:
            raise DataError(
                f"{_FLAG} {self.path}: weight version {newest[missing[0]]} generated a part of group {missing[0]}, "
                f"which is in rollout {rollout_id}: a rollout has no newer weights than those of its number. The file "
                "belongs to another run, or was changed."
            )
        # Weights before this run generated these, or no weights did.
        others = [number for number, version in newest.items() if version < self._first]
        numbers = [*self._due.pop(rollout_id, []), *others]
        await call_in_thread(self._draw, data_source, rollout_id, {*numbers, *plan})
        await gather([asyncio.create_task(self._advance(number, rollout_id)) for number in numbers])
        for number in plan:
            del self._plans[number]
        return [self._groups.pop(number) for number in plan]

    def _draw(self, data_source: Any, rollout_id: int, wanted: set[int]) -> None:
        missing = wanted - set(self._groups)
        while missing:
            groups = data_source.get_samples(len(missing))
            drawn = {int(next(iter_samples(group)).group_index or 0): group for group in groups}
            # a group that is in no batch was dropped, or was under way when the run ended
            unplanned = [group for number, group in drawn.items() if number not in self._plans]
            if unplanned and hasattr(data_source, "drop"):  # otherwise the Data Buffer keeps them for ever
                data_source.drop(rollout_id, unplanned)
            self._groups |= {
                number: self._begin(number, group) for number, group in drawn.items() if number in self._plans
            }
            if not groups or ((missing := missing - set(drawn)) and min(drawn) > max(missing)):
                raise DataError(
                    f"{_FLAG} {self.path}: the data source no longer returns group {min(missing)}: --prompt-data or "
                    "a flag that decides the order of prompts has changed. Use what the run was started with."
                )

    def _begin(self, number: int, group: SampleGroup) -> SampleGroup:
        """Give the samples of a drawn group the parts that weights before this run generated."""
        rows = self._plans[number]
        begun = min(_versions(rows), default=self._first) < self._first
        if len(group) != len(rows) and (begun or not self._is_custom(group)):
            raise DataError(
                f"{_FLAG} {self.path} has {len(rows)} samples of group {number}, and --n-samples-per-prompt is "
                f"{len(group)}: it cannot change, and a branch cannot continue a group to which a custom generate "
                "function added samples."
            )
        for sample, row in zip(iter_samples(group), rows, strict=False):
            ends = [end for version, end in row.parts if version is not None and version < self._first]
            if not ends or sample.response_length == ends[-1]:
                continue
            recorded = self._begun.get(row.index)
            if recorded is None:
                raise DataError(
                    f"{_FLAG} {self.path}: weights before version {self._first} generated {ends[-1]} tokens of sample "
                    f"{row.index}, and no record has them. Branch at rollout 0, or record all samples of a run "
                    "(--record-samples)."
                )
            restore(sample, recorded, ends, GenerateState(self.args).tokenizer)
        return group

    def _is_custom(self, group: SampleGroup) -> bool:
        """Whether a user's function generates the samples of ``group``."""
        first = next(iter_samples(group))
        return (first.generate_function_path or self.args.custom_generate_function_path) is not None

    async def _advance(self, number: int, version: int) -> None:
        """Generate the parts of one group that these weights generated."""
        args, group, rows = self.args, self._groups[number], self._plans[number]
        state = GenerateState(args)
        evaluates.set(False)
        # as in generate_and_rm_group, which is called for custom functions only
        for sample in iter_samples(group):
            sample.session_id = sample.session_id or str(uuid4())
        if self._is_custom(group):
            if len(_versions(rows)) > 1:
                raise DataError(
                    f"{_FLAG} {self.path}: weights changed while a custom generate function made group {number}: "
                    "its calls cannot be divided. Record a run without --custom-generate-function-path."
                )
            failed = {row.index for row in rows if row.failed == "generate"}
            for sample in iter_samples(group):
                if sample.index in failed:
                    await self._give_up(sample)
            self._groups[number] = await generate_and_rm_group(args, group, state.sampling_params.copy())
            return
        params = [seeded(state, state.sampling_params, position) for position in range(len(group))]
        tasks = [
            asyncio.create_task(self._advance_sample(sample, row, version, each))
            for sample, row, each in zip(group, rows, params, strict=True)
        ]
        self._groups[number] = group = await gather(tasks)
        if args.group_rm and max(_versions(rows), default=version) <= version:
            await score_group(args, group)

    async def _advance_sample(self, sample: Any, row: Planned, version: int, params: dict[str, Any]) -> Any:
        if is_given_up(sample):
            return sample
        args, begin, fails = self.args, 0, row.failed == "generate"
        is_over = not fails and max(_versions([row]), default=version) < version  # aborted with its last possible token
        if sample.status in FINISHED or is_over:
            return await generate_and_rm(args, sample, params)  # a restored sample lacks its reward
        known = [part for part in row.parts if part[0] is not None]
        for place, (part_version, end) in enumerate(known if fails else row.parts):
            is_open = sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED)
            # with changed flags a response may end earlier than the recorded one: its later parts are left out
            if part_version in (version, None) and is_open:
                if place == len(row.parts) - 1 and not fails:
                    return await generate_and_rm(args, sample, params)
                if end > begin:
                    state, call = GenerateState(args), functools.partial(generate, args)
                    async with state.semaphore:
                        await until_finished(call, None, state, sample, {**params, "max_new_tokens": end})
                else:  # an abort came before the first token
                    sample.weight_versions.append(str(version))
                    note_part(sample, version)
                # the limit ended it, not the model: the next part continues it
                if sample.response_length == end:
                    sample.status = Sample.Status.ABORTED
            begin = end
        if fails and max(_versions([row]), default=version) <= version:
            await self._give_up(sample)
        return sample

    async def _give_up(self, sample: Sample) -> None:
        """Let a sample fail, as it did in the recorded run."""
        give_up(sample, "generate", DataError("replayed"), "this sample had failed in the recorded run")
        if not self.args.group_rm:
            await score(self.args, sample)


def restore(sample: Sample, recorded: Sample, ends: Sequence[int], tokenizer: Any) -> None:
    """Give ``sample`` the first tokens of ``recorded``, up to the last of ``ends``. They have no reward yet."""
    count, begin = ends[-1], len(recorded.tokens) - recorded.response_length
    is_whole = count == recorded.response_length
    sample.tokens = recorded.tokens[: begin + count]
    sample.response_length = count
    sample.weight_versions = recorded.weight_versions[: len(ends)]
    sample.loss_mask = None if recorded.loss_mask is None else recorded.loss_mask[:count]
    log_probs = recorded.rollout_log_probs
    sample.rollout_log_probs = None if log_probs is None else log_probs[:count]
    sample.parts = parts_of(recorded)[: len(ends)]
    if is_whole:
        sample.response, sample.status = recorded.response, recorded.status
        return
    sample.status = Sample.Status.ABORTED
    pieces = itertools.pairwise([0, *ends])
    # part by part, as the engine decoded them
    sample.response = "".join(tokenizer.decode(sample.tokens[begin + a : begin + b]) for a, b in pieces)


def _versions(rows: Sequence[Planned]) -> set[int]:
    """The weights that generated parts of these samples."""
    return {version for row in rows for version, _ in row.parts if version is not None}


_replay: Replay | None = None


async def _next(replay: Replay, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    groups = await replay.batch(rollout_id, data_source)
    log_sample(next(iter_samples(groups)), f"rollout {rollout_id}, first sample")
    await BatchHooks(replay.args).finish(groups, list(groups), data_source)
    return RolloutFnTrainOutput(samples=groups)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The batch that the schedule has for this rollout.

    Raises:
        ConfigError: asked to evaluate, without a schedule, or with a flag that the schedule does not cover.
        DataError: the schedule does not fit the run.
    """
    global _replay
    if evaluation:
        raise ConfigError("the scheduled rollout cannot evaluate: set --eval-function-path.")
    if complete_args(args).replay_schedule is None:
        raise ConfigError(f"slime.rollout.scheduled_rollout executes a recorded schedule: it needs {_FLAG} FILE.")
    if args.mask_offpolicy_in_partial_rollout:
        raise ConfigError(
            f"--mask-offpolicy-in-partial-rollout does not work with {_FLAG}: the schedule does not record which part "
            "of a response was masked. Drop one of them."
        )
    if args.update_weights_interval != 1:
        raise ConfigError(
            f"--update-weights-interval {args.update_weights_interval} does not work with {_FLAG}: the schedule "
            "decides which weights generate. Drop the flag."
        )
    init_http_client(args)
    if _replay is None or _replay.path != args.replay_schedule:
        _replay = Replay(args, rollout_id)
    return run(_next(_replay, rollout_id, data_source))


generate_rollout.keeps_prompts = True  # type: ignore[attr-defined]  # parts of later batches are generated early
