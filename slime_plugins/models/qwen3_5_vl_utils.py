"""Positions of images and videos in packed sequences, for programs that call a vision-language model themselves."""

from slime.backends.training.media import build_packed_mrope_position_ids

__all__ = ["build_packed_mrope_position_ids"]
