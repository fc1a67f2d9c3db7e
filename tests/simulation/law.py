"""The law of the ledger: no prompt lost, none trained twice, no foreign version trained, and one history.

Checked twice: by the real audit of the ledger, and from the list of samples inside the trainer's checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.data.ledger import audit, read_ledger
from tests.simulation.world import World

GROUP_SIZE = 2


def broken_laws(here: World, mode: str, root: Path, num_rollouts: int, is_async: bool) -> list[str]:
    """The laws that a finished run has broken, one sentence each."""
    return [*_of_ledger(here, root), *_of_trainer(here, mode, num_rollouts, is_async), *_of_evaluations(here, mode)]


def changed_samples(here: World) -> Iterator[str]:
    """Rollouts that were trained, and after a death trained again with other samples. One sentence each."""
    first: dict[int, list[Any]] = {}
    for rollout, samples in here.globals["counted"]:
        if first.setdefault(rollout, samples) != samples:
            yield f"rollout {rollout} was trained on {first[rollout]}, and after a death on {samples}"


def _of_ledger(here: World, root: Path) -> Iterator[str]:
    entries, _ = read_ledger(root / "save" / "rollout" / "ledger.jsonl")
    found = audit(entries)
    for number, how in found.lost.items():
        yield f"ledger: group {number} was lost: {how}"
    for number, rollouts in found.twice.items():
        yield f"ledger: group {number} was trained on twice, in {rollouts}"
    trained = {sample[0] // GROUP_SIZE for entry in here.globals["trained"] for sample in entry["samples"]}
    if found.counts["trained"] != len(trained):
        yield f"ledger: {found.counts['trained']} groups were trained on, the weights know of {len(trained)}"
    for reason in found.unknown:
        yield f"ledger: {reason}"


def _of_trainer(here: World, mode: str, num_rollouts: int, is_async: bool) -> Iterator[str]:
    trained = here.globals["trained"]
    ids = [entry["rollout"] for entry in trained]
    if ids != list(range(num_rollouts)):
        yield f"the weights were trained on rollouts {ids}"
    counts = Counter(sample[0] for entry in trained for sample in entry["samples"])
    twice = sorted(index for index, count in counts.items() if count > 1)
    if twice:
        yield f"samples {twice} were trained on twice"
    for entry in trained:
        for index, _, versions, labels in entry["samples"]:
            yield from _foreign(entry["rollout"], index, versions, labels, mode, is_async)


def _of_evaluations(here: World, mode: str) -> Iterator[str]:
    for rollout, versions in here.globals["evaluated"]:
        trained_on = rollout + 1 if rollout else 0  # before the first rollout, then after every second one
        # beside an evaluation in the background the trainer goes on: engines that all return get the newer weights
        is_newer = "background" in mode and len(versions) == 1 and versions[0] == trained_on + 1
        if any(version != trained_on for version in versions) and not is_newer:
            yield f"the evaluation after rollout {rollout} scored tokens of versions {versions}"
    for named, scored in here.globals["labels"]:
        if scored not in (named, None):
            yield f"an evaluation of version {scored:.0f} was recorded as one of version {named}"


def _foreign(
    rollout: int, index: int, versions: list[int], labels: list[str], mode: str, is_async: bool
) -> Iterator[str]:
    where = f"sample {index} of rollout {rollout}"
    if not {str(version) for version in versions} <= set(labels):  # a request may end before its first token
        yield f"{where}: tokens of versions {versions} were reported as {labels}"
    oldest = 0 if mode in ("train, partial", "fully async") else rollout - 3 if is_async else rollout
    if any(not max(0, oldest) <= version <= rollout for version in versions):
        yield f"{where}: trained on tokens of versions {versions}"
