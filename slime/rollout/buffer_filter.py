"""Which groups of the buffer are drawn next: filters that see groups, and filters that see single samples.

Called by the data source. A filter is called with groups. One that fails on groups and works on samples, such as
``lambda args, buffer, n: sorted(buffer, key=lambda s: s.reward)[:n]``, is called with the samples of all groups: the
groups of the samples that it returns are drawn, in the order of their first sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.hooks.load import parameter_names
from slime.utils.errors import DataError


def pop_first(args: Any, rollout_id: Any, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """First in, first out; removes what it returns."""
    count = min(len(buffer), num_samples)
    taken = buffer[:count]
    del buffer[:count]
    return taken


def call_filter(function: Callable[..., Any], args: Any, buffer: list[Any], count: int) -> Any:
    """``function(args, rollout_id, buffer, count)`` or ``function(args, buffer, count)``, by its parameters."""
    names = parameter_names(function)
    takes_rollout = "rollout_id" in names or len(names) >= 4
    return function(args, None, buffer, count) if takes_rollout else function(args, buffer, count)


def takes_samples(function: Callable[..., Any], args: Any) -> bool:
    """Whether ``function`` expects single samples: it fails on a made-up buffer of groups, and not on their samples."""

    def works_on(buffer: list[Any]) -> bool:
        try:
            call_filter(function, args, buffer, 1)
        except (AttributeError, TypeError):
            return False
        except Exception:  # users' code may raise anything, and the real call shows it
            return True
        return True

    return function is not pop_first and not works_on(_made_up(args)) and works_on(list(iter_samples(_made_up(args))))


def choose(
    function: Callable[..., Any], buffer: list[SampleGroup], args: Any, count: int, *, has_samples: bool
) -> list[SampleGroup]:
    """At most ``count`` groups, which leave the buffer whether the filter removed them or not.

    Args:
        has_samples: the answer of :func:`takes_samples`.

    Raises:
        DataError: more groups than asked for, or something that is not in the buffer.
    """
    what = f"the buffer filter {getattr(function, '__qualname__', function)} (--buffer-filter-path)"
    if has_samples:
        group_of = {id(sample): group for group in buffer for sample in iter_samples(group)}
        chosen = call_filter(function, args, list(iter_samples(buffer)), count * max(map(len, buffer), default=1))
        if any(id(sample) not in group_of for sample in chosen):
            raise DataError(f"{what} returned something that is not a sample of the buffer")
        groups = list({id(group): group for group in (group_of[id(sample)] for sample in chosen)}.values())[:count]
    else:
        groups = call_filter(function, args, buffer, count)
    if len(groups) > count:
        raise DataError(f"{what} returned {len(groups)} groups where {count} were asked for")
    taken = {id(group) for group in groups}
    buffer[:] = [group for group in buffer if id(group) not in taken]
    return groups


def _made_up(args: Any) -> list[SampleGroup]:
    key, size = args.reward_key, max(1, args.n_samples_per_prompt)

    def sample(index: int) -> Sample:
        reward = float(index % 2)
        return Sample(
            group_index=index // size,
            index=index,
            prompt="1+1=",
            label="2",
            tokens=[1, 2],
            response="2",
            response_length=1,
            reward={key: reward} if key else reward,
            status=Sample.Status.COMPLETED,
        )

    return [[sample(group * size + i) for i in range(size)] for group in range(2)]
