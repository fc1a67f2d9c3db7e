"""Write the options that the installed megatron-core implies, for a parser that must not import it.

Megatron-LM turns the fields of its config dataclasses into command-line options. That code is not part of
megatron-core, the dataclasses are. This tool reads their source (nothing is imported) and writes one JSON file that
the command line loads. Run it after changing the version of megatron-core. A test fails when it is out of date.

    python tools/make_megatron_options.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "slime" / "backends" / "megatron_utils" / "core_options.json"

_CLASSES = (
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("transformer/transformer_config.py", "MLATransformerConfig"),
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
# Fields that are computed, or whose option has another name in Megatron-LM's own parser.
_NO_OPTION = """
    average_in_collective batch_p2p_comm batch_p2p_sync bias_activation_fusion bucket_size check_for_nan_in_grad
    clone_scatter_output_in_embedding cuda_graph_scope deallocate_pipeline_outputs enable_autocast fp8_param
    gated_linear_unit grad_reduce_in_fp32 is_hybrid_model nccl_ub num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints num_moe_experts
    pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation test_mode variable_seq_lengths
    use_te_rng_tracker virtual_pipeline_model_parallel_size use_ring_exchange_p2p pin_cpu_grads pin_cpu_params
    fp8_wgrad gradient_reduce_div_fusion async_tensor_model_parallel_allreduce tp_comm_bulk_wgrad tp_comm_bulk_dgrad
    tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag tp_comm_split_rs check_for_large_grads
"""
_KINDS = {"int": "int", "float": "float", "str": "str", "list[int]": "ints", "list[str]": "strs"}


def read_options() -> dict[str, Any]:
    """The content of the JSON file: ``version`` of megatron-core and ``options``, sorted by name."""
    found: dict[str, dict[str, Any]] = {}
    for file, name in _CLASSES:
        for option in _of_class(_core() / file, name):
            # If two classes declare a field, the first class of _CLASSES counts.
            found.setdefault(option["dest"], option)
    return {
        "version": importlib.metadata.version("megatron-core"),
        "options": [found[dest] for dest in sorted(found)],
    }


def _core() -> Path:
    # A top-level package is found without running its code.
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("megatron-core is not installed: pip install megatron-core")
    return Path(next(iter(spec.submodule_search_locations))) / "core"


def _of_class(path: Path, name: str) -> Iterator[dict[str, Any]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    option = _option(item.target.id, ast.unparse(item.annotation), item.value)
                    if option is not None:
                        yield option


def _option(dest: str, annotation: str, value: ast.expr | None) -> dict[str, Any] | None:
    """None for a field that no command line can give: a function, a dtype, a private or computed one."""
    kind = _kind(annotation)
    if kind is None or dest in _NO_OPTION.split() or dest.startswith("_"):
        return None
    default, names = _default(value)
    if kind == "bool":
        # A switch that is on by default can only be turned off, hence the flags below.
        kind = "off" if default is True else "switch"
    dashed = dest.replace("_", "-")
    flags = names or ([f"--no-{dashed}", f"--disable-{dashed}"] if kind == "off" else [f"--{dashed}"])
    return {"flags": flags, "dest": dest, "kind": kind, "default": default}


def _kind(annotation: str) -> str | None:
    inner = re.sub(r"^Optional\[(.*)\]$", r"\1", annotation).replace("List[", "list[")
    if inner.startswith("Literal["):
        return "str"
    return "bool" if inner == "bool" else _KINDS.get(inner)


def _default(value: ast.expr | None) -> tuple[Any, list[str]]:
    """The plain value and the explicit option names, if any."""
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        meta = _literal(keywords["metadata"]).get("argparse_meta", {}) if "metadata" in keywords else {}
        default = meta["default"] if "default" in meta else _literal(keywords.get("default"))
        return default, meta.get("arg_names", [])
    return _literal(value), []


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        # literal_eval does not compute. Any other expression has no plain default and becomes None.
        return {"2 ** 32": 2**32, "1024 * 1024": 1024 * 1024}.get(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if the file is out of date.")
    text = json.dumps(read_options(), indent=None, separators=(",", ":")).replace('},{"flags"', '},\n{"flags"') + "\n"
    if parser.parse_args().check:
        is_current = OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text
        print(f"{OUTPUT.relative_to(ROOT)}: " + ("current" if is_current else "out of date, run this tool"))
        return 0 if is_current else 1
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
