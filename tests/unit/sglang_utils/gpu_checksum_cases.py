"""Compares the checksum of parts with SGLang's kernel. A program, because triton's interpreter is a setting of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from slime.backends.sglang_utils.gpu_checksum import TileHash, tile_digests


def stock_module() -> Any:
    """SGLang's module alone: the import of the package would take seconds."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "kernels/ops/memory/gpu_tensor_hash.py"
    spec = importlib.util.spec_from_file_location("stock", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stock_checksum(stock: Any, tensor: torch.Tensor) -> str:
    """``gpu_tensor_hash`` without its demand for a GPU."""
    data = tensor.reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.uint32)
    seed, tiles = 0x243F6A88, -(-words.numel() // 8192)
    out = torch.empty(tiles, dtype=torch.uint64)
    seeds = {"seed1": seed, "seed2": ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF}
    factors = {"FM_C1": stock.FMIX32_C1, "FM_C2": stock.FMIX32_C2, "POS_A": stock.POS_C1, "POS_B": stock.POS_C2}
    stock.hash_tiles32_kernel_blocked[(tiles,)](
        words, out, words.numel(), **seeds, **factors, TILE=8192, BLOCK=256, USE_CG=True
    )
    return f"{stock._final_splitmix64(sum(out.tolist())):016x}"


def main() -> None:
    stock = stock_module()
    torch.manual_seed(0)
    hashes, expected = [], []
    for shape, dtype, ends in (
        ((3, 5), torch.float32, (1, 3)),
        ((4, 2055, 3), torch.bfloat16, (1, 3, 4)),
        ((9000,), torch.float32, (700, 8191, 8300, 9000)),
        ((7, 3), torch.bfloat16, (1, 2, 6, 7)),  # parts that end within a word
    ):
        tensor, begin, checksum = torch.randn(shape).to(dtype), 0, TileHash()
        for end in ends:
            checksum.add(tensor[None, begin:end])
            begin = end
        hashes.append(checksum)
        expected.append(stock_checksum(stock, tensor))
    tensor, checksum = torch.randn(5, 3000), TileHash()
    for order in (3, 0, 4, 2, 1):  # equal parts in any order
        checksum.add(tensor[None, order], order)
    hashes += [checksum, TileHash()]
    expected += [stock_checksum(stock, tensor), f"{0:016x}"]
    tensor, checksum = torch.randn(6, 4100).bfloat16(), TileHash(2)  # shares of columns, in two parts
    checksum.add(tensor[:5].unflatten(1, (2, -1)).movedim(1, 0))
    checksum.add(tensor[5:].unflatten(1, (2, -1)).movedim(1, 0))
    hashes.append(checksum)
    expected += [stock_checksum(stock, half.contiguous()) for half in tensor.chunk(2, 1)]
    found = [text for texts in tile_digests(hashes) for text in texts]
    for mine, theirs in zip(found, expected, strict=True):
        print("equal" if mine == theirs else "differs")


if __name__ == "__main__":
    main()
