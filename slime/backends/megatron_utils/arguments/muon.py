"""Flags of the optimizer Muon. Read by ``muon``; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.backends.training.arguments import flag

__all__ = ["MuonArgs"]


@dataclass(frozen=True)
class MuonArgs:
    """Muon (--optimizer muon or dist_muon)."""

    muon_momentum: float = flag(0.95, "Momentum.")
    muon_use_nesterov: bool = flag(False, "Nesterov's momentum.")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations.")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral", "Factor on the update of a matrix [m, n]: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))."
    )
    muon_extra_scale_factor: float = flag(1.0, "Another factor; 0.2 with spectral gives updates of the size of adam's.")
    muon_split_qkv: bool = flag(
        True,
        "Queries, keys and values are one matrix instead of three.",
        off="--no-muon-split-qkv",
        flags=("--disable-muon-split-qkv", "--muon-no-split-qkv"),
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag(
        "duplicated",
        "With tensor parallelism: a rank's part is a matrix of its own, or every rank gathers the whole matrix, or its "
        "products are summed over the ranks.",
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = flag(
        "medium", "Precision of matrix products on a GPU, as in torch.set_float32_matmul_precision. A CPU uses fp32."
    )
