"""From the trainer's sizes to what splitting a batch needs to know."""

from __future__ import annotations

import pytest

from slime.batch.schedule import ParallelLayout
from slime.utils.errors import ConfigError


def test_ranks_that_share_samples_are_counted_once() -> None:
    layout = ParallelLayout.of(16, tensor=2, pipeline=2, context=2)
    assert (layout.dp_size, layout.cp_size, layout.microbatch_multiple) == (2, 2, 2)


def test_an_interleaved_pipeline_takes_micro_batches_in_groups() -> None:
    sizes = {"tensor": 1, "pipeline": 4, "context": 1, "virtual_stages": 2}
    assert ParallelLayout.of(8, **sizes).microbatch_multiple == 2 * 4
    assert ParallelLayout.of(8, **sizes, group_size=6).microbatch_multiple == 2 * 6
    assert ParallelLayout.of(8, **(sizes | {"virtual_stages": None}), group_size=6).microbatch_multiple == 2


def test_sizes_that_do_not_divide_the_ranks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"6 trainer ranks .* groups of 4, .*--context-parallel-size 2"):
        ParallelLayout.of(6, tensor=2, pipeline=1, context=2)
