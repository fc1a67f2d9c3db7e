"""The model families. Every ``Family`` in a module of this package is registered."""
