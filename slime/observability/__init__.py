"""Logging, metrics and where they are written."""
