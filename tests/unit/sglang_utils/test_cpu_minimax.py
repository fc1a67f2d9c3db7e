"""The norm of MiniMax-M2 in an engine on a CPU."""

from __future__ import annotations

import torch


def test_the_norm_over_all_heads_is_that_of_torch_however_the_heads_are_divided() -> None:
    from slime.backends.sglang_utils.cpu_platform.models.supported import normalize, sums_of_squares

    generator = torch.Generator().manual_seed(0)
    query, key, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 16), (5, 8), (16,)))
    expected = [
        torch.nn.functional.rms_norm(rows, rows.shape[1:], weight[: rows.size(1)], 1e-6) for rows in (query, key)
    ]
    halves = list(zip(query.chunk(2, dim=1), key.chunk(2, dim=1), strict=True))
    total = sum(sums_of_squares(*half) for half in halves)
    parts = [
        normalize(*half, weight[8 * rank : 8 * rank + 8], weight[4 * rank : 4 * rank + 4], total, 2, 1e-6)
        for rank, half in enumerate(halves)
    ]
    for whole, both in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(both, dim=1), whole)
