"""Groups out of what data sources and users' functions hand over: groups, or a flat list of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime.data.sample import Sample, SampleGroup
from slime.utils.errors import DataError

__all__ = ["as_groups"]


def as_groups(items: Sequence[Any], make_group: Callable[[Sample], SampleGroup]) -> list[SampleGroup]:
    """Groups stay as they are. Flat samples with the same ``group_index`` form one; a sample without becomes its own.

    Args:
        make_group: turns a single prompt into a group.

    Raises:
        DataError: anything else than groups or samples.
    """
    if all(isinstance(item, list) for item in items):
        return list(items)
    if not all(isinstance(item, Sample) for item in items):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise DataError(f"expected groups (lists of Sample) or samples from or for the data source, got {kinds}")
    groups: list[SampleGroup] = []
    by_index: dict[int, SampleGroup] = {}
    for sample in items:
        if sample.group_index is None:
            groups.append(make_group(sample))
        elif sample.group_index in by_index:
            by_index[sample.group_index].append(sample)
        else:
            by_index[sample.group_index] = [sample]
            groups.append(by_index[sample.group_index])
    return groups
