"""Rules of training in FP8: what the machine must have. Called by ``argument_rules``; imports no torch."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator

from slime.utils import accelerator

__all__ = ["fp8"]


def fp8(args: Namespace) -> Iterator[str]:
    """FP8 products are TransformerEngine's, on a GPU."""
    if args.fp8 is None:
        if "fp8_recipe" in args.given:
            yield f"--fp8-recipe {args.fp8_recipe} needs --fp8-format."
        return
    flag = f"--fp8-format {args.fp8}"
    if accelerator.current().is_cpu:
        yield f"{flag} needs a GPU with TransformerEngine; this run is on a CPU. Leave it out to train in bf16."
    elif importlib.util.find_spec("transformer_engine") is None:
        yield f"{flag} needs the package transformer_engine, which is not installed. Leave it out to train in bf16."
    if not args.bf16:
        yield f"{flag} is for weights in bf16: drop --fp16 or --fp32."
