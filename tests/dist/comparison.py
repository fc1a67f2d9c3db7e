"""Comparing what two layouts saw: words for layouts, tolerances, and the table of ``docs/parallelism.md``.

The table is written by the tests themselves: ``SLIME_WRITE_TABLES=1 pytest tests/dist``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer

Result = dict[str, Any]
Train = Callable[..., list[Result]]

# (prompt, response): the shortest there are, shorter than 2 * CP, and one much longer than the rest
NASTY = ((1, 1), (1, 2), (2, 1), (3, 4), (1, 6), (30, 1), (1, 90))

PLAIN = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "global_batch_size": 8, "lr": 1e-3}
_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "sp": "sequence_parallel",
    "distopt": "use_distributed_optimizer",
    "token": "calculate_per_token_loss",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "mapped": "use_tp_pp_dp_mapping",
    "size": "size",
}


def layout_args(text: str) -> dict[str, Any]:
    """``"tp2 sp cp2"`` -> arguments. A word without a number is a switch."""
    settings: dict[str, Any] = {"use_distributed_optimizer": False}
    for word in text.split():
        name = word.rstrip("0123456789")
        settings[_SHORT[name]] = int(word[len(name) :]) if word != name else True
    return settings


def trainer(ranks: ForkServer, directory: Path, batch: Any, make: Callable[[str, Path], Any], **common: Any) -> Train:
    """``train(model, world_size, layout, **arguments)``: the results of all ranks. Those of one rank are remembered.

    Args:
        make: writes the checkpoint of a model, called once for each.
        common: arguments of all runs.
    """
    known: dict[str, list[Result]] = {}

    def run(model: str, world_size: int, layout: str, **arguments: Any) -> list[Result]:
        key = f"{model}{world_size}{layout}{arguments}"
        if key in known:
            return known[key]
        if not (directory / model).exists():
            make(model, directory / model)
        settings = PLAIN | layout_args(layout) | {"output_dir": str(directory)} | common | arguments
        case = {"hf": str(directory / model), "batch": batch, "num_steps": 2, "size": settings.pop("size", 3)}
        results = ranks.run("tests.dist.layout_cases:train", world_size, **case, args=settings)
        if world_size == 1:
            known[key] = results
        return results

    return run


_PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
_BEGIN, _END = "<!-- written by tests/dist -->", "<!-- end -->"
_COLUMNS = ("log-probs", "loss", "gradient norm (relative)", "gradients", "weights after two steps")


class ComparisonTable:
    """One line per layout."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, world_size: int, layout: str, largest: Mapping[str, float]) -> None:
        """``largest`` differences by column."""
        figures = [f"{largest[name]:.0e}" if name in largest else "sharded" for name in _COLUMNS]
        ranks, default = ("rank", "size3") if world_size == 1 else ("ranks", "data parallel")
        name = f"{world_size} {ranks}: {layout.strip() or default}"
        self._lines[name] = f"| {name} | {' | '.join(figures)} |"

    def close(self) -> None:
        """Write the page when the environment asks for it."""
        if os.environ.get("SLIME_WRITE_TABLES") != "1" or not self._lines:
            return
        text = _PAGE.read_text(encoding="utf-8")
        before, rest = text.split(_BEGIN)
        _, after = rest.split(_END)
        head = [f"| layout | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"]
        table = "\n".join([_BEGIN, "", *head, *self._lines.values(), "", _END])
        _PAGE.write_text(before + table + after, encoding="utf-8")


def main_rank(results: list[Result]) -> Result:
    (main,) = [result for result in results if result["report"].steps]
    return main


def assert_equal(reference: Result, results: list[Result], *, weight_tolerance: float = 1e-4) -> dict[str, float]:
    """Items 1 to 5 and 9 of the contract, in fp32. Returns the largest differences, for the table.

    Args:
        weight_tolerance: a tenth of the learning rate. Adam makes a whole step of a gradient that is only rounding.
    """
    main = main_rank(results)
    largest = {"log-probs": 0.0}
    for result in results:
        for position, values in result["log_probs"].items():
            torch.testing.assert_close(values, reference["log_probs"][position], atol=1e-5, rtol=0)
            largest["log-probs"] = max(largest["log-probs"], _difference(values, reference["log_probs"][position]))
    for ours, theirs in zip(main["report"].steps, reference["report"].steps, strict=True):
        expected = pytest.approx(_without_rates(theirs), rel=1e-4, abs=1e-5)
        assert _without_rates(ours) == expected, f"{_without_rates(ours)}, expected {expected}"
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in _steps(main, reference)]
    largest["loss"] = max(abs(a["loss"] - b["loss"]) for a, b in _steps(main, reference))
    largest["gradient norm (relative)"] = max(abs(a - b) / b for a, b in norms)
    assert main["report"].rollout == pytest.approx(reference["report"].rollout, rel=1e-4, abs=1e-6)
    assert set(main["gradients"]) in (set(), set(reference["gradients"]))
    for name, gradient in main["gradients"].items():
        torch.testing.assert_close(gradient, reference["gradients"][name], atol=3e-6, rtol=1e-5, msg=name)
    if main["gradients"]:
        largest["gradients"] = max(_difference(g, reference["gradients"][n]) for n, g in main["gradients"].items())
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(main["weights"][name], weight, atol=weight_tolerance, rtol=0, msg=name)
    largest["weights after two steps"] = max(
        _difference(main["weights"][n], w) for n, w in reference["weights"].items()
    )
    return largest


def _steps(left: Result, right: Result) -> list[tuple[dict[str, float], dict[str, float]]]:
    return list(zip(left["report"].steps, right["report"].steps, strict=True))


def _without_rates(step: dict[str, float]) -> dict[str, float]:
    """A rank that owns experts has separate parameter groups for them, hence more learning rates."""
    return {name: value for name, value in step.items() if not name.startswith("lr-pg_")}


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max()) if left.numel() else 0.0


def assert_replicas_agree(results: list[Result]) -> None:
    """Bitwise: exported weights on all ranks, log-probs and advantages on the ranks that share samples."""
    for result in results[1:]:
        for name, weight in results[0]["weights"].items():
            assert torch.equal(result["weights"][name], weight), name
    for dp_rank in {result["dp_rank"] for result in results}:
        first, *others = [result for result in results if result["dp_rank"] == dp_rank]
        for other in others:
            for name, column in first["columns"].items():
                assert all(torch.equal(a, b) for a, b in zip(other["columns"][name], column, strict=True)), name
