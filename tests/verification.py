"""Comparisons with their tolerances: the assertion of a test and a row of ``docs/verification.md``.

A test calls :func:`verify` instead of asserting by itself. The committed page must have the row with this tolerance, so
that both change together. Its figures are the largest differences of the run that wrote it:

    SLIME_WRITE_TABLES=1 pytest tests/unit tests/dist      (or only the files concerned)
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.marked_part import with_part

if TYPE_CHECKING:
    import torch

__all__ = ["PAGE", "Row", "plain_attention", "rows_of_page", "verify", "write_page"]

PAGE = Path(__file__).parents[1] / "docs" / "verification.md"
_BEGIN, _END = "<!-- written by the tests -->", "<!-- end -->"
_HEAD = ("| what | compared with | tolerance | largest difference | test |", "|---|---|---|---|---|")

Scale: TypeAlias = Literal["absolute", "relative", "mixed"]
_SCALES: dict[Scale, str] = {"absolute": "", "relative": " relative", "mixed": " (1 + size)"}


@dataclass(frozen=True)
class Row:
    what: str
    against: str
    tolerance: str
    largest: str
    test: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.against} | {self.tolerance} | {self.largest} | `{self.test}` |"


_seen: dict[tuple[str, str], tuple[Row, float]] = {}


def verify(
    what: str, against: str, ours: Any, theirs: Any, *, tolerance: float = 0.0, scale: Scale = "absolute"
) -> None:
    """Assert that ``ours`` and ``theirs`` differ by at most ``tolerance``, as in the page's row.

    Args:
        ours, theirs: numbers, tensors, or equally long sequences of them.
        tolerance: 0 means bit for bit.
        scale: the difference is divided by 1, by ``theirs``, or by 1 + ``theirs``, element by element.
    """
    largest = _difference(ours, theirs, scale)
    assert largest <= tolerance, f"{what}: differs from {against} by {largest:.3g}, allowed is {tolerance:g} ({scale})"
    key = (what, against)
    largest = max(largest, _seen[key][1] if key in _seen else 0.0)
    text = f"{tolerance:.0e}{_SCALES[scale]}" if tolerance else "bit for bit"
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    row = Row(what, against, text, f"{largest:.0e}" if largest else "0", test)
    _seen[key] = row, largest
    if os.environ.get("SLIME_WRITE_TABLES") != "1":
        assert _tolerances().get(key) == text, (
            f"{PAGE} lacks or contradicts {row}: run SLIME_WRITE_TABLES=1 pytest {test}"
        )


@functools.cache
def _tolerances() -> dict[tuple[str, str], str]:
    return {(row.what, row.against): row.tolerance for row in rows_of_page()}


def _difference(ours: Any, theirs: Any, scale: Scale) -> float:
    import torch

    if isinstance(ours, Sequence):
        assert len(ours) == len(theirs), f"{len(ours)} values, expected {len(theirs)}"
        return max((_difference(a, b, scale) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    a, b = (torch.as_tensor(value).detach().double() for value in (ours, theirs))
    assert a.shape == b.shape, f"shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    if not a.numel():
        return 0.0
    match scale:
        case "absolute":
            size: Any = 1.0
        case "relative":
            size = b.abs()
        case "mixed":
            size = 1.0 + b.abs()
        case _:
            raise ValueError(scale)
    differs = (a - b).abs()
    assert bool(torch.isfinite(differs).all()), "not finite"
    return float(torch.where(differs == 0, 0.0, differs / size).max())


def rows_of_page() -> list[Row]:
    """The rows of the committed page."""
    table = PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    return [
        Row(*match.groups())
        for match in re.finditer(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| `(.+?)` \|$", table, re.MULTILINE)
    ]


def write_page() -> None:
    """Write this session's figures into the page if the environment asks for it. Other rows stay."""
    if os.environ.get("SLIME_WRITE_TABLES") != "1" or not _seen:
        return
    ran = {row.test for row, _ in _seen.values()}
    rows = {(row.what, row.against): row for row in rows_of_page() if row.test not in ran}
    rows |= {key: row for key, (row, _) in _seen.items()}
    lines = [*_HEAD, *map(str, sorted(rows.values(), key=lambda row: (row.test, row.what)))]
    page = with_part(str(PAGE), PAGE.read_text(encoding="utf-8"), (_BEGIN, _END), "\n".join(lines))
    PAGE.write_text(page, encoding="utf-8")


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Causal attention of packed sequences by the definition, a loop over queries: ``[T, h, d]`` to ``[T, h * d]``."""
    import torch  # not at the top: the conftest of tests without torch imports this file

    heads_per_group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(heads_per_group, 1), v.repeat_interleave(heads_per_group, 1)
    rows, begin = [], 0
    for length in lengths:
        for t in range(begin, begin + length):
            scores = torch.einsum("hd,shd->hs", q[t], k[begin : t + 1]) / q.size(2) ** 0.5
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[begin : t + 1]).flatten())
        begin += length
    return torch.stack(rows)
