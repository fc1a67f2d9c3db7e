"""The counts of a weight sync on the page are those of the trainer's code, and of arithmetic on shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import weight_sync_layouts as layouts
from slime.backends import EVERY_RANK, SOURCE, Recipients

_SCRIPT = "run-qwen3-30B-A3B.sh"  # 8 ranks, TP 4, EP 8
_BUCKET = 2 << 30


def _sizes() -> tuple[int, int, int]:
    """Bytes of experts, of tensors that tensor-parallel ranks divide, and of all others. From the published shape."""
    layers, hidden, heads, groups, head, width, experts, vocab = 48, 2048, 32, 4, 128, 768, 128, 151936
    padded = -(-vocab // 512) * 512
    expert = layers * experts * 3 * hidden * width
    divided = layers * hidden * head * (2 * heads + 2 * groups) + 2 * padded * hidden
    whole = layers * (2 * hidden + 2 * head + experts * hidden) + hidden
    return 2 * expert, 2 * divided, 2 * whole


def test_the_page_shows_what_the_trainers_code_counts() -> None:
    page = layouts.PAGE.read_text(encoding="utf-8")
    for line in layouts.table(["Qwen3-30B-A3B"]).splitlines():
        assert line in page, "run: python benchmarks/weight_sync_layouts.py --write"
    assert [name for name in layouts.SCRIPTS if name not in page] == []


def test_ranks_receive_the_shards_of_the_others_and_no_copies() -> None:
    expert, divided, whole = _sizes()
    every = layouts.count(_SCRIPT, 0, EVERY_RANK, _BUCKET)
    assert every.received == expert * 7 // 8 + divided * 3 // 4
    assert every.exported == pytest.approx(expert + divided + whole, rel=1e-4)  # without padding of the vocabulary
    assert layouts.count(_SCRIPT, 0, SOURCE, _BUCKET).received == every.received
    assert layouts.count(_SCRIPT, 1, SOURCE, _BUCKET).received == 0
    assert layouts.count(_SCRIPT, 4, SOURCE, _BUCKET).received == 0


def test_ranks_of_an_engine_with_expert_parallelism_receive_the_experts_of_a_device() -> None:
    expert, divided, _ = _sizes()
    halves = Recipients(blocks=tuple((rank // 4, 2) for rank in range(8)))
    # half of the experts, of which the rank holds an eighth
    half = layouts.count(_SCRIPT, 0, halves, _BUCKET)
    assert half.received == expert * 3 // 8 + divided * 3 // 4
    # the trainer's own division: nothing moves
    eighths = Recipients(blocks=tuple((rank, 8) for rank in range(8)))
    eighth = layouts.count(_SCRIPT, 3, eighths, _BUCKET)
    assert eighth.received == divided * 3 // 4
    assert eighth.calls < half.calls
    assert eighth.text_bytes < half.text_bytes


def test_the_updater_sends_by_block_where_the_script_gives_engines_expert_parallelism() -> None:
    recipe = layouts.read_recipe("run-deepseek-r1.sh")
    assert recipe.expert_blocks == 64
    found = layouts.recipients_of(recipe, colocated=True)
    assert found.blocks[63:66] == ((63, 64), (0, 64), (1, 64))
    assert layouts.recipients_of(replace(recipe, expert_blocks=1), colocated=True) == EVERY_RANK
