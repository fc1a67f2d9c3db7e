"""Layer specs by the names that launch scripts pass as ``--spec``; the model families build the same layers without."""
