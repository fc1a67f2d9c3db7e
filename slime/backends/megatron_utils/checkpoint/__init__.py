"""Training states on disk, and weights between Hugging Face checkpoints and the live model."""
