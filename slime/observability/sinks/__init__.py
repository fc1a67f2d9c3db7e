"""One file per destination of metrics."""
