#!/usr/bin/env python3
"""Turn an INT4 Hugging Face checkpoint (compressed-tensors, as Kimi-K2-Thinking is published) into a bf16 one.

    python tools/convert_k2_thinking_int4_to_bf16.py --model-dir /models/Kimi-K2-Thinking

Training does not need it: --hf-checkpoint may be the INT4 directory itself. No GPU is used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import run_tool
from slime.utils.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="The checkpoint to read.")
    parser.add_argument("--output-dir", help="The directory to write. Default: MODEL_DIR_bf16.")
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help="Convert the tensors of these .safetensors files of MODEL_DIR only."
    )
    parser.add_argument("--config-path", help="The config.json of the result. Default: that of MODEL_DIR.")
    parser.add_argument("--overwrite", action="store_true", help="Replace --output-dir where it exists.")
    options = parser.parse_args()
    target = options.output_dir or f"{options.model_dir.rstrip('/')}_bf16"
    if options.config_path is not None and not Path(options.config_path).is_file():
        raise ConfigError(f"--config-path {options.config_path} is not a file.")
    if Path(target).exists() and not options.overwrite:
        raise ConfigError(f"--output-dir {target} exists already; --overwrite replaces it.")
    # Imports torch: after the checks, so that a wrong path fails at once.
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    reader = TensorReader(options.model_dir, "--model-dir")
    names = sorted(reader.names if options.files is None else reader.names_in(options.files))
    write_hf_directory(
        # The reader restores 16-bit values. A generator: they are never in memory all at once.
        ((name, reader.get(name)) for name in names),
        options.model_dir,
        target,
        config_path=options.config_path,
        # Otherwise tensors of the source that are missing here would be added, which --files excludes.
        keeps_rest=options.files is None,
    )
    print(f"{len(names)} tensors -> {target}")


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
