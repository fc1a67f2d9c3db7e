#!/usr/bin/env python3
"""Turn an FP8 Hugging Face checkpoint (128 x 128 blocks, DeepSeek-V3's format) into a bf16 one.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path /models/DeepSeek-V3 --output-bf16-hf-path /models/DeepSeek-V3-bf16

Training does not need it: --hf-checkpoint may be the FP8 directory itself. No GPU is used.
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
    parser.add_argument("--input-fp8-hf-path", required=True, help="The checkpoint to read.")
    parser.add_argument("--output-bf16-hf-path", required=True, help="The directory to write; must not exist.")
    options = parser.parse_args()
    if Path(options.output_bf16_hf_path).exists():
        raise ConfigError(f"--output-bf16-hf-path {options.output_bf16_hf_path} exists already.")
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    reader = TensorReader(options.input_fp8_hf_path, "--input-fp8-hf-path")
    # The reader restores 16-bit values and hides the tensors of scales. A generator: never all in memory.
    weights = ((name, reader.get(name)) for name in sorted(reader.names))
    write_hf_directory(weights, options.input_fp8_hf_path, options.output_bf16_hf_path)
    print(f"{len(reader.names)} tensors -> {options.output_bf16_hf_path}")


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
