"""One file per model family. Every ``Family`` in a module of this package is registered."""
