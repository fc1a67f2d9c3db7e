"""Peak memory of log-probs at a vocabulary of 152k, in fp32 chunks of logits.

    python benchmarks/logprob_memory.py

Counts the bytes that torch's allocator holds beyond the logits and their gradient, in a pass without gradients and in a
training pass. Counts depend neither on the machine nor on its load. The goal is 1.2 chunks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.doctor.gpu_kernels import gib, log_prob_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = log_prob_memory(options.rows, options.vocabulary, options.chunk)
    result = {
        **vars(options),
        "chunk_gib": gib(options.chunk * options.vocabulary * 4),
        "forward_chunks": round(found.forward, 4),
        "training_chunks": round(found.training, 4),
        "error": found.error,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
