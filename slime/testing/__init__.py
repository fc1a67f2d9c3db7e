"""Contract tests for users' functions: calls them as a run does, with small inputs, and checks their results.

    python -m slime.testing --custom-rm-path my_pkg.rewards.reward_func        or the flags of a whole train command

    from slime.testing import check_plugin
    assert check_plugin("--custom-rm-path", "my_pkg.rewards.reward_func") == []

Starts no engines: a small HTTP server in this process replaces them. Covers every hook of ``slime.hooks``.
"""

from __future__ import annotations

import asyncio
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slime.config.groups import with_values
from slime.data.processing import load_tokenizer, render_chat
from slime.data.sample import Sample
from slime.hooks import check_hooks, load_function
from slime.hooks.protocols import HOOKS, Hook
from slime.ray.arguments import parse_only
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import GenerateState
from slime.testing.checks import CHECKS, SIGNATURE_ONLY, TRAINER_CHECKS, Call
from slime.testing.fakes import GROUP_SIZE, QUESTION, pretend_engine
from slime.utils.async_utils import call_in_thread, run, user_frames
from slime.utils.errors import ConfigError, SlimeError, kept
from slime.utils.prompt_sources import parse_path, parse_sources

_NEEDS_ENGINE = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
_NEEDS_DATA = {"data_source_path": "prompt_data", "eval_function_path": "eval_datasets"}
_MAX_RESPONSE_LEN = 16
_FRAMES = 3
_PATIENCE_S = 300.0


@dataclass
class Outcome:
    """The result for one function.

    Attributes:
        kind: ``signature`` if the function was not called and only its signature was checked.
        note: the reason for that.
    """

    flag: str
    path: str
    kind: Literal["ok", "signature", "bad"]
    problems: list[str] = field(default_factory=list)
    note: str = ""


def check_command(argv: Sequence[str]) -> list[Outcome]:
    """Check every function that the flags of a train command name.

    Args:
        argv: flags of ``train.py``. Required flags about data and devices may be missing.

    Raises:
        ConfigError: the flags cannot be read.
    """
    args, problems = parse_only(list(argv), loads_hooks=False)
    if args is None:
        raise ConfigError(problems)
    if args.hf_checkpoint and not Path(args.hf_checkpoint).is_dir():
        raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: no such directory")
    outcomes = []
    for hook in HOOKS:
        if hook.dest not in args.given:
            continue
        value = vars(args)[hook.dest]
        outcomes += [_Trial(hook, path, args).outcome() for path in ([value] if isinstance(value, str) else value)]
    return outcomes


def check_plugin(flag: str, path: str, *more_flags: str) -> list[str]:
    """The problems of one function, for an ``assert`` in a test.

    Args:
        flag: the option that would name it, such as ``--custom-rm-path``.
        path: dotted name, ``module:function``, ``file.py`` or ``file.py:function``.
        more_flags: other flags of its command, such as ``"--reward-key", "score"``. Functions that generate need
            ``"--hf-checkpoint", DIRECTORY`` for its tokenizer and are only compared with their signature without it.
    """
    if flag not in {hook.flag for hook in HOOKS}:
        known = ", ".join(hook.flag for hook in HOOKS)
        raise ConfigError(f"{flag} names no user function; these flags do: {known}")
    return [problem for outcome in check_command([flag, path, *more_flags]) for problem in outcome.problems]


@dataclass(frozen=True)
class _Trial:
    """The call of one function."""

    hook: Hook
    path: str
    args: Namespace

    def outcome(self) -> Outcome:
        hook, path = self.hook, self.path
        # this hook alone: check_hooks reports problems of all hooks that it finds
        paths = {h.dest: path if h is hook else None for h in HOOKS}
        # --group-rm decides which signature a reward function needs
        problems = check_hooks(Namespace(**paths, group_rm=self.args.group_rm))
        if problems:
            return Outcome(hook.flag, path, "bad", problems)
        if why_not := self._why_not_called():
            return Outcome(hook.flag, path, "signature", note=why_not)
        errors: list[Exception] = []
        with kept(errors):  # of the user's code
            problems = [f"{hook.flag} {path}: {problem}" for problem in run(_in_time(self._problems()))]
        if errors:
            return Outcome(hook.flag, path, "bad", [_described(hook, path, errors[0])])
        return Outcome(hook.flag, path, "bad" if problems else "ok", problems)

    def _why_not_called(self) -> str:
        name = self.hook.dest
        if name not in CHECKS and name not in TRAINER_CHECKS:
            return SIGNATURE_ONLY
        if name in _NEEDS_ENGINE and not self.args.hf_checkpoint:
            return "its signature fits; give --hf-checkpoint and it is called, with a pretended engine"
        if name in _NEEDS_DATA and not vars(self.args)[_NEEDS_DATA[name]]:
            return "its signature fits; give --prompt-data (--eval-prompt-data for evaluation) and it is called"
        return ""

    def _problems(self) -> Iterator[str]:
        hook, args = self.hook, with_values(self.args, n_samples_per_prompt=GROUP_SIZE)
        for other in HOOKS:  # one function at a time: the others have checks for themselves
            if other.dest != hook.dest and other.dest in CHECKS:
                setattr(args, other.dest, [] if other.dest == "rollout_sample_hook_path" else None)
        function = load_function(self.path, hook.role, group_rm=args.group_rm)
        check = CHECKS.get(hook.dest) or TRAINER_CHECKS[hook.dest]
        with ExitStack() as stack:
            call = Call(function, args, self._first_row())
            yield from check(_with_engine(call, stack) if hook.dest in _NEEDS_ENGINE else call)

    def _first_row(self) -> Sample:
        """Return the first row of the run's data, or a made-up question without data or tokenizer."""
        if not self.args.prompt_data or not self.args.hf_checkpoint:
            return QUESTION
        source = parse_sources(self.args.prompt_data)[0].path
        path, rows = parse_path(source)
        # one row is read, not the whole data set
        first = with_values(self.args, prompt_data=source if rows else f"{path}@[0:1]", streaming_data=False)
        ((sample, *_),) = RolloutDataSource(first).get_samples(1)
        assert isinstance(sample, Sample)
        return sample


async def _in_time(problems: Iterator[str]) -> list[str]:
    # the thread of a function that hangs cannot be stopped: it only is not awaited any more
    limit = asyncio.timeout(_PATIENCE_S)
    try:
        async with limit:
            return await call_in_thread(list, problems)
    except TimeoutError:
        if not limit.expired():  # raised by the function itself
            raise
        return [f"it did not return within {_PATIENCE_S:g} s"]


def _described(hook: Hook, path: str, error: Exception) -> str:
    """Format the error with the lines of the user's code that led to it, and the last line of other code."""
    cause = error.__cause__ if isinstance(error, SlimeError) and error.__cause__ else error
    frames = user_frames(cause)[-_FRAMES:]
    last = traceback.extract_tb(cause.__traceback__)[-1]
    if last not in frames and not isinstance(error, SlimeError):
        frames.append(last)
    lines = "".join(traceback.format_list(frames)).splitlines()
    message = str(error) if isinstance(error, SlimeError) else f"raised {type(error).__name__}: {error}"
    named = f"{hook.flag} {path}"
    return "\n    ".join([message if message.startswith(named) else f"{named}: {message}", *lines])


def _with_engine(call: Call, stack: ExitStack) -> Call:
    """Start a pretended engine. Returns the call with its address, and with a made-up row as a chat."""
    given, row = call.args, call.row
    tokenizer = load_tokenizer(given.hf_checkpoint, trust_remote_code=True)
    host, port = stack.enter_context(pretend_engine(tokenizer))
    args = with_values(
        given,
        sglang_router_ip=host,
        sglang_router_port=port,
        rollout_num_gpus=given.rollout_num_gpus or 1,
        rollout_max_response_len=min(given.rollout_max_response_len, _MAX_RESPONSE_LEN),
        rollout_batch_size=2,
        over_sampling_batch_size=2,
        # rollout functions score their samples, and fail without any reward
        rm_type=given.rm_type or "random",
    )
    # a singleton: an earlier check may have made it with other arguments
    GenerateState.clear_instances()
    stack.callback(GenerateState.clear_instances)
    if row is QUESTION and tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION.prompt}]
        row = Sample(prompt=render_chat(tokenizer, messages, add_generation_prompt=True), label=QUESTION.label)
    return Call(call.function, args, row)
