"""GPTQ: 4-bit weights whose rounding errors cancel on the inputs of a layer.

For ``tools/convert_hf_to_int4.py``. Knows matrices, no models.
"""

from __future__ import annotations

import torch

from slime.weight_sync.quantize import int4_scale, round_int4

# errors are passed on to all further columns after this many, as one product (the paper's lazy batch)
_COLUMNS = 128


class InputStatistics:
    """Sum of ``x x'`` over the inputs ``x`` of a linear layer with ``size`` inputs: half the Hessian of its error."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.products = torch.zeros(size, size, device=device)
        self.num_inputs = 0

    def add(self, inputs: torch.Tensor) -> None:
        """``[..., size]``."""
        rows = inputs.flatten(0, -2).float()
        self.products += rows.T @ rows
        self.num_inputs += len(rows)


def quantise(
    weight: torch.Tensor, products: torch.Tensor, group_size: int, dampening: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frantar et al. 2022, "GPTQ" (arXiv:2210.17323), algorithm 1: minimizes ``|W X - Q X|`` column by column.

    Each column is rounded, and the columns to its right are changed to compensate its error::

        Q_j = round(W_j)      e = (W_j - Q_j) / U_jj      W_k -= e U_jk for k > j      U = cholesky(H^-1), upper

    Args:
        weight: ``[M, N]``.
        products: :class:`InputStatistics` of the layer, ``[N, N]``.
        group_size: columns that share a scale. Divides N. A scale is chosen when its group's first column is reached.
        dampening: added to the diagonal of H, as a share of its mean.

    Returns:
        Whole numbers of -8..7 as floats ``[M, N]``, and scales ``[M, N / group_size]`` in the weight's dtype.
    """
    left = weight.float().clone()
    columns = left.shape[1]
    values, scales = torch.empty_like(left), []
    upper = _inverse_factor(products, dampening)
    for begin in range(0, columns, _COLUMNS):
        end = min(begin + _COLUMNS, columns)
        errors = torch.zeros_like(left[:, begin:end])
        for j in range(begin, end):
            if j % group_size == 0:
                # columns of the group beyond this batch have not got its errors yet
                group = left[:, j : j + group_size].clone()
                group[:, max(0, end - j) :] -= errors[:, : j - begin] @ upper[begin:j, max(end, j) : j + group_size]
                scales.append(int4_scale(group).to(weight.dtype))
            values[:, j] = round_int4(left[:, j], scales[-1])
            error = (left[:, j] - values[:, j] * scales[-1].float()) / upper[j, j]
            left[:, j + 1 : end] -= error[:, None] * upper[j, j + 1 : end]
            errors[:, j - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return values, torch.stack(scales, dim=1)


def _inverse_factor(products: torch.Tensor, dampening: float) -> torch.Tensor:
    """Upper triangular U with ``U' U`` the inverse of the damped Hessian."""
    # fp64: with few inputs the Hessian is almost singular
    hessian = products.double()
    diagonal = hessian.diagonal()
    # inputs that were never seen touch nothing else, and their weights are rounded as they are
    mean = diagonal.mean() if diagonal.any() else torch.ones_like(diagonal[0])
    hessian = hessian + torch.eye(len(hessian), device=hessian.device, dtype=hessian.dtype) * (dampening * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def squared_error(difference: torch.Tensor, products: torch.Tensor) -> float:
    """The squared error of a layer's outputs over the inputs of ``products``.

    Args:
        difference: change of the weight, ``[M, N]``.
    """
    return float(((difference.float() @ products) * difference.float()).sum())
