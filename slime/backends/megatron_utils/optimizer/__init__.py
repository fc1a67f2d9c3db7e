"""Megatron's optimizer, Muon, and AdamW with its states in host memory."""
