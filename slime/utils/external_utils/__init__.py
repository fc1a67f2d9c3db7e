"""Helpers for launchers written in Python."""
