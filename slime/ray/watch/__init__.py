"""Bounded waits on Ray, heartbeats of the run's processes, and failure reports."""
