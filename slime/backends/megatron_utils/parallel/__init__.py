"""The engines' choices of experts, replayed on this rank's share of the tokens."""
