"""Room on disk for what the run writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slime.config.plan.files import Output, plan_files
from slime.config.plan.layout import PlanError
from slime.config.plan.render import size
from slime.config.plan.shape import Shape, read_shape
from slime.doctor.finding import Finding, Situation, fail, ok

__all__ = ["disk_space"]

_SPARE = 1024**3


def disk_space(situation: Situation) -> Iterator[Finding]:
    """Every place that is written to can be, and holds two of the largest thing written there (the old, the new)."""
    if situation.args is None:
        return
    shape: Shape | None
    try:
        shape = read_shape(situation.args)
    except PlanError:
        shape = None
    for place, outputs in _by_place(plan_files(situation.args, shape)).items():
        what = " and ".join(dict.fromkeys(output.what for output in outputs))
        if any(f"{place} cannot be written" in problem for problem in situation.problems):
            continue  # named with its flag already
        if not os.access(place, os.W_OK):
            yield fail("disk", f"{place} cannot be written ({what})", "name another folder, or change its rights")
            continue
        needed = _SPARE + 2 * sum(output.bytes or 0 for output in outputs)
        free = shutil.disk_usage(place).free
        value = f"{size(free)} free at {place} for {what}"
        if free < needed:
            yield fail("disk", f"{value}, two of each take {size(needed)}", "free space, or write elsewhere")
        else:
            yield ok("disk", value)


def _by_place(outputs: list[Output]) -> dict[Path, list[Output]]:
    """Outputs by the nearest folder that exists."""
    places: dict[Path, list[Output]] = {}
    for output in outputs:
        place = Path(output.where).absolute()
        while not place.is_dir():
            place = place.parent
        places.setdefault(place, []).append(output)
    return places
