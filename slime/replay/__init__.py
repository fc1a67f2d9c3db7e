"""``slime replay``: one recorded sample again, in one process where ``breakpoint()`` works.

    record of the run ──▶ prompt ──▶ generate_and_rm_group ──▶ compile ──▶ one trainer in this process ──▶ loss
                          siblings: as recorded. They normalize the rewards and have no part in the loss

Everything runs in the main thread, with the user's functions that the run's command line names. ``history`` replays
whole schedules. Called by ``slime.cli``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data.columns import TrainData, column
from slime.data.engine_fields import SAMPLING_MASK
from slime.data.sample import Sample, iter_samples
from slime.observability.run_info import RunInfo, read_run_info
from slime.observability.sample_record import read_rows, record_file, sample_of_row
from slime.replay.history import replay_all, without
from slime.utils.errors import ConfigError, DataError
from slime.utils.net import single_rank_environment


class Recording:
    """The turns of one sample, which answer the requests of a replay in place of an engine.

    A turn is the range of the response tokens that one request wrote, counted from the start of the sample.

    A request whose ids are the beginning of the recorded sample gets the tokens that follow there, up to the next
    tokens that the model did not write. Requests of text are answered in the order of the recording. Any other request
    is refused with the position of its first difference: the code has changed, or a tool returned something else.

    Args:
        tokenizer: decodes the texts of the replies.
    """

    def __init__(self, sample: Sample, tokenizer: Any) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._turns = list(_turns(sample))
        self.num_answered = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f"slime replay: request {self.num_answered + 1} {reason}")

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            ValueError: the request is not in the recording.
        """
        ids = payload.get("input_ids")
        turn = self._next_in_order() if ids is None else self._after(ids)
        self.num_answered += 1
        return self._reply(turn, len(ids) if ids is not None else turn.start)

    def _next_in_order(self) -> range:
        if self.num_answered >= len(self._turns):
            raise self._refused(f"has no reply: the recording has {len(self._turns)} turns")
        return self._turns[self.num_answered]

    def _after(self, ids: Sequence[int]) -> range:
        recorded = self._sample.tokens
        # a request may be longer than the recording: the missing tokens are None
        pairs = enumerate(itertools.zip_longest(ids, recorded[: len(ids)]))
        apart = next((place for place, (asked, known) in pairs if asked != known), None)
        if apart is not None:
            known = recorded[apart] if apart < len(recorded) else "the end"
            raise self._refused(
                f"departs from the recording at token {apart}: it has {ids[apart]}, recorded is {known}. "
                "The prompt, the template, a tool or the code has changed."
            )
        # a request may begin within a turn: a weight update aborts requests, and the rollout sends the rest again
        turn = next((turn for turn in self._turns if len(ids) in turn), None)
        if turn is None:
            raise self._refused(f"has no reply: after token {len(ids)} the model wrote nothing")
        return range(len(ids), turn.stop)

    def _reply(self, turn: range, num_prompt: int) -> dict[str, Any]:
        sample = self._sample
        ids = sample.tokens[turn.start : turn.stop]
        begin = len(sample.tokens) - sample.response_length
        # a reply needs a number per token, also if the run recorded none
        log_probs = (sample.rollout_log_probs or [0.0] * sample.response_length)[turn.start - begin : turn.stop - begin]
        # only the last turn can have reached the limit of tokens
        was_cut = turn.stop == len(sample.tokens) and sample.status is Sample.Status.TRUNCATED
        versions = sample.weight_versions
        meta: dict[str, Any] = {
            "id": f"replay-{self.num_answered}",
            "finish_reason": {"type": "length" if was_cut else "stop"},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, ids, strict=True)],
        }
        if sample.rollout_top_p_token_offsets is not None:
            sets, offsets = list(sample.rollout_top_p_token_ids), list(sample.rollout_top_p_token_offsets)
            borders = itertools.pairwise(offsets[turn.start - begin : turn.stop - begin + 1])
            meta[SAMPLING_MASK] = [[int(token) for token in sets[a:b]] for a, b in borders]
        if versions:
            # there may be fewer versions than turns: later turns get the last one
            meta["weight_version"] = versions[min(self.num_answered, len(versions)) - 1]
        return {"text": self._tokenizer.decode(ids, skip_special_tokens=False), "output_ids": ids, "meta_info": meta}


def _turns(sample: Sample) -> Iterator[range]:
    """Yield the stretches of trained tokens. The tokens between them come from tools or environments."""
    place = len(sample.tokens) - sample.response_length
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    for is_own, stretch in itertools.groupby(mask):
        length = len(list(stretch))
        if is_own:
            yield range(place, place + length)
        place += length


_SHOWN = ("loss", "pg_loss", "kl_loss", "entropy_loss", "ppo_kl", "train_rollout_logprob_abs_diff", "grad_norm")
_ONE_PROCESS = shlex.split(
    """
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --context-parallel-size 1 --expert-model-parallel-size 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
    --record-samples 0
    """
)
# flags that are dropped: they need several processes and have no value for one, or refuse those that it does not read
_OF_MANY_PROCESSES = frozenset(
    shlex.split(
        """
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
        --microbatch-group-size-per-virtual-pipeline-stage --num-distributed-optimizer-instances
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --expert-tensor-parallel-size
        --rollout-external-engine-addrs --sglang-config --prefill-num-servers --sglang-enable-dp-attention
        --sglang-tp-size --sglang-tensor-parallel-size --sglang-pp-size --sglang-pipeline-parallel-size
        --sglang-dp-size --sglang-data-parallel-size --sglang-ep-size --sglang-expert-parallel-size
        --strict-args
        """
    )
)
# timeout of rewards and requests: long enough for a person at a breakpoint
_PATIENCE_S = 86_400.0


@dataclass(frozen=True)
class Recorded:
    """A sample and its group as the run left them.

    Attributes:
        group: the recorded samples of its prompt, in order.
        place: of the sample in the group.
        version: newest weights that wrote into it. None if no engine reported a version.
    """

    group: list[Sample]
    place: int
    version: int | None

    @property
    def sample(self) -> Sample:
        return self.group[self.place]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        args: the run's arguments, with those of the replay.
        group: with the sample generated again in place of the recorded one.
        samples: the rows of its execution: one, unless the run's generate function returns several.
    """

    args: Namespace
    group: list[Any]
    samples: list[Sample]


def replay(words: Sequence[str]) -> int:
    """The command ``slime replay``.

    Returns:
        0 if the tokens and the reward (with --all the weights) equal the recorded ones, 1 if they differ.

    Raises:
        SlimeError: the replay is impossible.
    """
    parser = argparse.ArgumentParser(
        prog="slime replay",
        description="Replay one recorded sample in one ordinary process: your generate function with recorded "
        "replies, your reward, and the loss. breakpoint() works in all of them.",
    )
    parser.add_argument("run", type=Path, help="folder of the run: <output-dir>/<experiment>")
    parser.add_argument("--rollout", type=int, metavar="R")
    parser.add_argument("--sample", type=int, metavar="S", help="its place in the rollout, from 0")
    parser.add_argument("--no-train", action="store_true", help="generate and score only: needs no model")
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="weights for the loss; default: the run's own")
    parser.add_argument("--all", action="store_true", help="the whole run again, by its schedule (deterministic runs)")
    parser.add_argument("--name", metavar="NAME", help="with --all: the folder beside RUN; default: RUN-replay")
    options = parser.parse_args(list(words))
    if not options.all and None in (options.rollout, options.sample):
        parser.error("--rollout R --sample S, or --all")
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]  # set by a process of Ray, whose debugger waits for a remote client
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # tracebacks of the user's functions
    folder = options.run.resolve()
    if options.all:
        return replay_all(folder, options.name or f"{folder.name}-replay")
    info = read_run_info(folder)
    recorded = load_recorded(folder, options.rollout, options.sample)
    args, weights = replay_args(info, recorded.version, options.hf_checkpoint)
    replayed = generate(args, recorded)
    is_same = _compare(recorded.sample, replayed.samples)
    if not options.no_train:
        step, means = train(replayed, options.rollout)
        print(f"\nloss of this sample, with the weights of {weights}")
        _table({name: step[name] for name in _SHOWN if name in step})
        _table({name: means[name] for name in ("advantages", "log_probs", "rollout_log_probs") if name in means})
    return 0 if is_same else 1


def _compare(recorded: Sample, made: Sequence[Sample]) -> bool:
    """Print both samples side by side. True if they are equal."""
    if not made:
        print("the execution returned no sample")
        return False
    # an execution that returns several rows matches if one of them is the record
    again = next((row for row in made if row.tokens == recorded.tokens), made[0])
    if len(made) > 1:
        print(f"the execution returned {len(made)} samples; one of them should equal the record")
    rows = [
        ("status", recorded.status.value, again.status.value),
        ("response tokens", recorded.response_length, again.response_length),
        ("trained tokens", recorded.effective_response_length, again.effective_response_length),
        ("reward", recorded.reward, again.reward),
    ]
    print(f"{'':<18} {'recorded':>24} {'now':>24}")
    for name, before, now in rows:
        print(f"{name:<18} {before!s:>24} {now!s:>24}{'' if before == now else '   differs'}")
    same_tokens = recorded.tokens == again.tokens
    print(f"{'tokens':<18} {'the same' if same_tokens else 'differ':>49}")
    print(f"\n{again.prompt}{again.response}")
    return same_tokens and all(before == now for _, before, now in rows)


def _table(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        print(f"  {name:<32} {value:.6g}")


def load_recorded(run: Path, rollout: int, position: int) -> Recorded:
    """Read a recorded sample and its group.

    Raises:
        DataError: the sample is not recorded.
    """
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
        The arguments, and a description of the trainer's weights.

    Raises:
        ConfigError: the command line is not valid any more.
    """
    from slime.ray.arguments import parse_only

    if os.path.isdir(info.cwd):
        os.chdir(info.cwd)  # relative paths of the command line start there
    weights, words = _weights(info, version, hf_checkpoint)
    # appended, because argparse takes the last value of a flag
    argv = [*without(info.argv, _OF_MANY_PROCESSES), *_ONE_PROCESS, *words]
    args, problems = parse_only(argv, is_async=False)
    if args is None or problems:
        raise ConfigError(problems)
    return args, weights


def _weights(info: RunInfo, version: int | None, hf_checkpoint: str | None) -> tuple[str, list[str]]:
    """Return (description, flags) of the trainer's weights.

    These are the weights that generated the sample if the run kept their checkpoint, else those of the run's start.
    """
    if hf_checkpoint is not None:
        return hf_checkpoint, ["--load", hf_checkpoint]
    save = info.settings.get("save")
    # version N has trained on N rollouts, so its checkpoint is that of rollout N - 1
    if version and save and (Path(save) / f"iter_{version - 1:07d}").is_dir():
        return f"{save}, rollout {version - 1}", ["--load", save, "--ckpt-step", str(version - 1), "--finetune"]
    began = str(info.hf_checkpoint)
    note = f"{began}; those of version {version} are not on disk, so the loss differs" if version else began
    return note, ["--load", began]


def generate(args: Namespace, recorded: Recorded) -> Replayed:
    """Generate and score the sample with the run's functions and recorded replies.

    Raises:
        SlimeError: the generate function or the reward raised, or sent a request that is not in the recording.
    """
    from slime.config.groups import with_values
    from slime.data.processing import load_tokenizer
    from slime.rollout import sglang_rollout
    from slime.rollout.failures import is_given_up, without_response
    from slime.testing.fakes import serving
    from slime.utils.http_utils import init_http_client

    fresh = without_response(recorded.sample)
    # the generate function tokenizes the prompt again
    fresh.tokens = []
    fresh.reward = None
    group: list[Any] = list(recorded.group)
    group[recorded.place] = fresh
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    with serving(Recording(recorded.sample, tokenizer).answer) as (host, port):
        engine_args = with_values(
            args,
            max_sample_retries=0,  # a retry would ask for a reply that is already used
            rm_timeout=_PATIENCE_S,
            rollout_request_timeout=_PATIENCE_S,
            sglang_router_ip=host,
            sglang_router_port=port,
            sglang_model_routers={"default": (host, port)},
        )
        init_http_client(engine_args)
        params = sglang_rollout.GenerateState(engine_args).sampling_params.copy()
        made = asyncio.run(sglang_rollout.generate_and_rm_group(engine_args, group, params))
    samples = list(iter_samples([made[recorded.place]]))
    for sample in samples:
        if is_given_up(sample):
            raise DataError(sample.metadata["failure"]["message"])
    return Replayed(args, made, samples)


def _rows(data: TrainData, places: Sequence[int]) -> TrainData:
    """Keep only these rows of the batch. Their rewards are already normalized."""
    num = len(data["tokens"])
    is_row = {name: column(name).per == "sample" and len(values) == num for name, values in data.items()}
    return {name: [values[p] for p in places] if is_row[name] else values for name, values in data.items()}


def train(replayed: Replayed, rollout: int) -> tuple[dict[str, float], dict[str, float]]:
    """One training step of one process on the replayed sample. Its siblings only normalize its reward.

    Returns:
        Metrics of the step, and means over the sample.
    """
    from slime.algorithms.arguments import needs_reference
    from slime.batch.compile import compile_train_data
    from slime.batch.rewards import RewardArgs
    from slime.batch.schedule import MicroBatchArgs, ParallelLayout
    from slime.batch.ship import split_by_dp
    from slime.config.groups import from_args, with_values
    from slime.hooks import load_optional
    from slime.ray.train_actor import trainer_class

    args = replayed.args
    if args.use_critic:
        raise ConfigError(
            f"--advantage-estimator {args.advantage_estimator}: a replay has no critic and therefore no loss; use "
            "--no-train."
        )
    hooks = (args.custom_reward_post_process_path, args.custom_convert_samples_to_train_data_path)
    post_process, convert = map(load_optional, hooks)
    data = compile_train_data(
        [replayed.group], rewards=from_args(RewardArgs, args), post_process=post_process, convert=convert, args=args
    )
    # by identity: siblings may be equal to the sample
    places = [i for i, row in enumerate(iter_samples(replayed.group)) if any(row is own for own in replayed.samples)]
    data = _rows(data, places)
    shipment = split_by_dp(
        data,
        layout=ParallelLayout(dp_size=1),
        # one step, whatever the size of the run's batches
        global_batch_size=len(set(data["rollout_ids"])),
        settings=from_args(MicroBatchArgs, args),
    )
    # a process group of one: the trainer's collectives run unchanged
    os.environ.update(single_rank_environment(), LOCAL_RANK="0")
    # the learning-rate schedule needs the length of the run
    args = with_values(args, num_rollout=args.num_rollout or rollout + 1)
    make = trainer_class(args.train_backend, "actor")
    trainer = make(args, rank=0, world_size=1, with_ref=needs_reference(args))
    trainer.setup()
    report = trainer.train(rollout, shipment.ranks[0])
    return report.steps[-1], report.rollout
