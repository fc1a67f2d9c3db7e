"""Public alias: ``from slime.utils.types import Sample``."""

from slime.data.sample import Sample, SampleGroup, iter_samples

__all__ = ["Sample", "SampleGroup", "iter_samples"]
