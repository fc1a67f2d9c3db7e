"""GLM-5 and GLM-5.2."""
