"""The model: built from the shape, its layers, and which of its parameters learn."""
