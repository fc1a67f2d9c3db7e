"""Public alias of the loss masks for supervised training; they live in ``slime.data.loss_masks``."""

from slime.data.loss_masks import MultiTurnLossMaskGenerator, get_response_lengths

__all__ = ["MultiTurnLossMaskGenerator", "get_response_lengths"]
