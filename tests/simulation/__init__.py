"""Deterministic simulation of the control plane: the real code of ``slime`` on a simulated clock, network and disk."""
