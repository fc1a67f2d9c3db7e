"""GSPO: the importance ratio of a whole sequence instead of one per token. Called by ``policy_loss``.

Credit is that of GRPO. The clipped surrogate is PPO's, with the ratio below.
"""

from __future__ import annotations

import torch

from slime.algorithms.reduce import Samples


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, samples: Samples) -> torch.Tensor:
    """``log(1 / s_i)`` at every token of sample i, where ``s_i`` is the length-normalized sequence ratio.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7: ``s_i = exp(1/|y_i| sum_t log(pi_new / pi_old))``. The
    mean runs over the trained tokens. Sign: old minus new, so ``s_i = exp(-result)``.

    Args:
        log_probs: ``[N]`` with graph: the gradient of each token contains every token of its sample.
        old_log_probs: ``[N]``.
        samples: where each sample begins and which of its tokens count.

    Returns:
        ``[N]`` fp32.
    """
    return samples.spread(samples.means(old_log_probs - log_probs))
