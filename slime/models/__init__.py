"""Model families: shape, tensor names, special layers, sizes. One file per family in ``families``."""
