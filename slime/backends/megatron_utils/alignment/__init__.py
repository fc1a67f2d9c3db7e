"""Layers that compute as the engines do, so that both sides give a token the same probability."""
