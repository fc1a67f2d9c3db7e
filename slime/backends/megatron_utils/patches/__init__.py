"""Changes to somebody else's code, one file each, applied by an explicit call and never at import."""
