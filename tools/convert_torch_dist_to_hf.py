#!/usr/bin/env python3
"""Convert a Megatron checkpoint (torch_dist) back into a Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py \\
        --input-dir /run/iter_0000099 --output-dir /run/hf --origin-hf-dir /models/Qwen3-4B

config.json, tokenizer and whatever else holds no weights comes from --origin-hf-dir, and so do tensors that training
does not build (multi-token-prediction layers). One process and no GPU are enough.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import OfflineModel, read_options, run_tool
from slime.config.groups import RunConfig
from slime.utils.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both tools of this name have besides Megatron's flags."""
    parser.add_argument("--input-dir", required=True, help="An iter_... directory, or one with a tracker file.")
    parser.add_argument("--output-dir", required=True, help="Directory to write.")
    parser.add_argument("--origin-hf-dir", dest="hf_checkpoint", required=True, help="Directory it was trained from.")
    parser.add_argument("--model-name", help="Without effect: --origin-hf-dir names the family. For older scripts.")
    parser.add_argument("--chunk-size", type=int, default=5 * 1024**3, help="Largest safetensors file, in bytes.")
    parser.add_argument("-f", "--force", action="store_true", help="Replace --output-dir if it exists.")
    parser.add_argument(
        "-a", "--add-missing-from-origin-hf", action="store_true", help="Always done; accepted for older scripts."
    )


def main() -> None:
    args = read_options(add_options, __doc__)
    convert(args)


def convert(args: argparse.Namespace, num_writers: int = 1) -> None:
    """Write --output-dir, whole or not at all.

    Args:
        num_writers: files that are written at a time.
    """
    target = Path(args.output_dir)
    if target.exists() and not args.force:
        raise ConfigError(f"--output-dir {target} exists already: -f replaces it.")
    # After the check above: building the model may take minutes.
    with OfflineModel(RunConfig.of(args), reads=("--input-dir", args.input_dir)) as model:
        from slime.backends.training.hf_files import write_hf_directory

        source = model.load_torch_dist("--input-dir", args.input_dir)
        if model.is_main:
            write_hf_directory(
                model.export(),
                args.hf_checkpoint,
                str(target),
                max_file_bytes=args.chunk_size,
                num_writers=num_writers,
            )
            print(f"{source.directory} -> {target}")
        else:
            # The export gathers tensors from all ranks: every rank must step through it, or rank 0 waits forever.
            for _ in model.export():
                pass


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
