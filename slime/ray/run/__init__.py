"""The run as the driver sees it: its steps, its cluster, its restart, and how it ends."""
