"""Changes to megatron-core, applied by an explicit call and never at import."""
