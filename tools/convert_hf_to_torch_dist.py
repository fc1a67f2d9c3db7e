#!/usr/bin/env python3
"""Convert a Hugging Face checkpoint into Megatron's distributed layout (torch_dist), which loads on any layout.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" \\
        --hf-checkpoint /models/Qwen3-4B --save /models/Qwen3-4B_torch_dist

One process and no GPU are enough as long as the model fits into memory. Under torchrun the processes share it
(--tensor-model-parallel-size and its companions, pipeline stages by default). The model flags may be left out: they
follow from config.json, and are checked against it where given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import OfflineModel, read_options, run_tool
from slime.config.groups import RunConfig
from slime.utils.errors import ConfigError


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face directory to convert.")


def main() -> None:
    args = read_options(_add_options, __doc__)
    if args.save is None:
        raise ConfigError("--save is required: the directory that receives release/ and its tracker file.")
    # Checked before the model is built, which may take minutes.
    if (Path(args.save) / "release").exists():
        raise ConfigError(f"--save {args.save} already holds release/: delete it or name another directory.")
    with OfflineModel(RunConfig.of(args)) as model:
        model.load_hf()
        model.save_release(args.save)
        if model.is_main:
            print(f"{args.hf_checkpoint} -> {args.save}/release")


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
