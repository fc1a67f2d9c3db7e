#!/usr/bin/env python3
"""Quantize a Hugging Face checkpoint to 4 bits with GPTQ, which needs texts to calibrate on.

    python tools/convert_hf_to_int4.py --input-dir /models/Qwen3-30B-A3B --output-dir /models/Qwen3-30B-A3B-INT4 \\
        --data-dir /data/texts

Works layer by layer: each layer is calibrated on the output of the quantized layers before it. Quantizes every matrix
of the decoder layers except routers, experts included, in the format of convert_hf_to_int4_direct.py. For serving only:
a weight sync rounds to nearest, and reaches experts only. --data-dir is a .jsonl or .parquet file or a folder of them,
whose rows have a `text`, or a `prompt`, `input` or `messages` that may be a list of messages. Uses a GPU if there is
one, and holds one layer on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convert_hf_to_int4_direct import quantization_config

from slime.backends.megatron_utils.conversion import run_tool
from slime.models.config_json import read_model_config
from slime.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from slime.backends import NamedTensor
    from tools.gptq import InputStatistics

_TEXT_KEYS = ("text", "prompt", "input", "messages")
_KEPT = (
    *("mlp.gate", "shared_expert_gate", "block_sparse_moe.gate"),  # routers
    *("in_proj_a", "in_proj_b", "in_proj_ba", "weights_proj"),
)
"""Ends of names of small matrices that decide too much."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="The checkpoint to read (safetensors).")
    parser.add_argument("--output-dir", required=True, help="The directory to write; must not exist.")
    parser.add_argument("--data-dir", required=True, help="Texts like those that the model will see.")
    parser.add_argument("--quant-type", choices=("W4A16", "W8A16"), default="W4A16")
    parser.add_argument("--num-calibration-samples", type=int, default=256, help="Rows of --data-dir that are used.")
    parser.add_argument("--max-sequence-length", type=int, default=2048, help="Tokens of a row that are used.")
    parser.add_argument("--dampening-frac", type=float, default=0.01, help="Of the mean of the Hessian's diagonal.")
    parser.add_argument("--quant-group-size", type=int, default=32, help="Values of a row that share a scale.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run code that the checkpoint brings.")
    options = parser.parse_args()
    _check(options)
    convert(options)


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.quant_type != "W4A16":
        problems.append(f"--quant-type {options.quant_type} is not supported yet: 8-bit integers cannot be read back.")
    for name in ("num_calibration_samples", "max_sequence_length", "quant_group_size"):
        if getattr(options, name) < 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1.")
    if not options.dampening_frac > 0:
        problems.append(f"--dampening-frac {options.dampening_frac} must be greater than 0.")
    if Path(options.output_dir).exists():
        problems.append(f"--output-dir {options.output_dir} exists already.")
    if problems:
        raise ConfigError(problems)


def convert(options: argparse.Namespace) -> None:
    """Write --output-dir, whole or not at all."""
    from transformers import AutoModelForCausalLM

    from slime.backends.training.hf_files import TensorReader, write_hf_directory
    from slime.data.processing import load_tokenizer

    reader = TensorReader(options.input_dir, "--input-dir")
    if read_model_config(options.input_dir).get("quantization_config"):
        raise ConfigError(
            f"--input-dir {options.input_dir} is quantised already: make a bf16 checkpoint of it first, with "
            "fp8_cast_bf16.py or convert_k2_thinking_int4_to_bf16.py."
        )
    tokenizer = load_tokenizer(options.input_dir, trust_remote_code=options.trust_remote_code)
    # Reads only as many rows as are used: --data-dir may be far larger.
    texts = list(islice(_token_ids(options, tokenizer), options.num_calibration_samples))
    if not texts:
        raise ConfigError(f"--data-dir {options.data_dir}: there is no text in it.")
    settings = {"dtype": "auto", "trust_remote_code": options.trust_remote_code, "experts_implementation": "eager"}
    try:
        model = AutoModelForCausalLM.from_pretrained(options.input_dir, **settings).eval()
    except ValueError as error:  # a model type that it does not know, or remote code that is not trusted
        raise ConfigError(f"--input-dir {options.input_dir}: transformers cannot load it: {error}") from None
    quantised = quantise_model(model, texts, reader.names, options)
    # a head that is tied to the embedding is a linear layer without a tensor
    ignored = {"lm_head"} | {name.removesuffix(".weight") for name in reader.names - quantised.keys()}
    config = quantization_config(options.quant_group_size, sorted(ignored))
    weights = _stored(reader.names, reader.get, quantised)
    write_hf_directory(weights, options.input_dir, options.output_dir, quantization=config)
    print(f"{len(quantised)} of {len(reader.names)} tensors in 4 bits -> {options.output_dir}")


def _token_ids(options: argparse.Namespace, tokenizer: Any) -> Iterator[list[int]]:
    from slime.data.processing import tokenize_chat
    from slime.data.rows import numbered_rows

    source = Path(options.data_dir)
    files = sorted([*source.glob("*.jsonl"), *source.glob("*.parquet")]) if source.is_dir() else [source]
    for file in files:
        for where, row in numbered_rows(str(file)):
            text = next((row[key] for key in _TEXT_KEYS if row.get(key)), None)
            if isinstance(text, str):
                ids = tokenizer(text).input_ids
            elif isinstance(text, list):
                ids = tokenize_chat(tokenizer, text)
            else:
                raise DataError(f"{where}: there is none of {', '.join(_TEXT_KEYS)} in it")
            if ids:
                yield ids[: options.max_sequence_length]


def _stored(
    names: set[str], get: Callable[[str], torch.Tensor], quantised: Mapping[str, list[torch.Tensor]]
) -> Iterator[NamedTensor]:
    for name in sorted(names):
        if name not in quantised:
            yield name, get(name)
            continue
        for suffix, tensor in zip(("_packed", "_scale", "_shape"), quantised[name], strict=True):
            yield name + suffix, tensor


@dataclass
class _Matrix:
    """A weight of a layer: a view into the model, and what goes into it."""

    name: str
    weight: torch.Tensor
    inputs: InputStatistics = field(init=False)

    def __post_init__(self) -> None:
        from tools.gptq import InputStatistics

        self.inputs = InputStatistics(self.weight.shape[1], self.weight.device)


def quantise_model(
    model: Any, texts: list[list[int]], names: set[str], options: argparse.Namespace
) -> dict[str, list[torch.Tensor]]:
    """Packed words, scales and shape of every quantized weight, by the checkpoint's names."""
    import torch

    from slime.utils.accelerator import current

    device = current().device()
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(f"--input-dir {options.input_dir}: {type(model).__name__} has no list of decoder layers.")
    prefix = next(name for name, module in model.named_modules() if module is layers)
    done: dict[str, list[torch.Tensor]] = {}
    with torch.inference_mode():
        # One run per text, without padding: padding would count in the statistics.
        hidden, calls = _first_inputs(model, layers, texts)
        for index, layer in enumerate(layers):
            layer.to(device)
            watched = _watched(layer, f"{prefix}.{index}", names, options.quant_group_size)
            for one, arguments in zip(hidden, calls[index], strict=True):
                _run(layer, one, arguments, device)
            shares = []
            # All inputs of a layer are collected before any of its matrices changes.
            for matrices, hook in watched:
                # Without this the second pass below would add its inputs to the statistics.
                hook.remove()
                shares += [_quantise_matrix(matrix, done, options) for matrix in matrices]
            # The second pass gives the next layer the inputs that it gets from the quantized layer.
            hidden = [_run(layer, one, arguments, device) for one, arguments in zip(hidden, calls[index], strict=True)]
            # One layer is on the GPU at a time.
            layer.to("cpu")
            error = f"{sum(shares) / len(shares):.2f} of rounding's error" if shares else "nothing to quantise"
            print(f"layer {index + 1} of {len(layers)}: {len(shares)} matrices, {error}", flush=True)
    return done


def _first_inputs(
    model: Any, layers: Any, texts: list[list[int]]
) -> tuple[list[torch.Tensor], list[list[dict[str, Any]]]]:
    """The inputs of the first layer, per text, and the other arguments of every layer, per layer and text."""
    import torch

    hidden: list[torch.Tensor] = []
    calls: list[list[dict[str, Any]]] = [[] for _ in layers]
    originals = [layer.forward for layer in layers]

    def taking_notes(index: int) -> Callable[..., torch.Tensor]:
        def forward(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            if index == 0:
                hidden.append(hidden_states)
            calls[index].append(arguments)
            # Skips the layer's computation. Layers run one by one later, with these arguments.
            return hidden_states

        return forward

    for index, layer in enumerate(layers):
        layer.forward = taking_notes(index)
    try:
        for ids in texts:
            model.get_decoder()(input_ids=torch.tensor([ids]), use_cache=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--input-dir: {type(model).__name__} is not supported yet: its layers pass each other more than hidden "
            f"states ({error}). Use convert_hf_to_int4_direct.py, which needs no model."
        ) from None
    finally:
        for layer, original in zip(layers, originals, strict=True):
            # Also after an error: the layers must compute again.
            layer.forward = original
    return hidden, calls


def _run(layer: Any, hidden: torch.Tensor, arguments: dict[str, Any], device: torch.device) -> torch.Tensor:
    output = layer(hidden.to(device), **_moved(arguments, device))
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    # Hidden states of all texts together may exceed the GPU's memory.
    return result.cpu()


def _moved(value: Any, device: torch.device) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if type(value) in (list, tuple) else value


def _watched(layer: Any, prefix: str, names: set[str], group_size: int) -> list[tuple[list[_Matrix], Any]]:
    """The matrices of a layer, module by module, with the hook that adds up their inputs."""
    import torch

    found: list[tuple[list[_Matrix], Any]] = []
    for path, module in layer.named_modules():
        name = f"{prefix}.{path}"
        if name.endswith(_KEPT):
            continue
        if isinstance(module, torch.nn.Linear):
            matrix = _matrix(f"{name}.weight", module.weight, names, group_size)
            found.append(([matrix], module.register_forward_pre_hook(_of_linear(matrix))))
        elif _is_experts(module):
            experts = [_expert(module, name, number, names, group_size) for number in range(len(module.down_proj))]
            matrices = [matrix for expert in experts for matrix in expert]
            found.append((matrices, module.register_forward_pre_hook(_of_experts(experts))))
        # A 3-dimensional "weight" is a convolution. Any other such parameter is an unknown layout of experts,
        # which would otherwise stay in 16 bits without a message.
        elif any(parameter.dim() == 3 for key, parameter in module.named_parameters(recurse=False) if key != "weight"):
            raise ConfigError(
                f"--input-dir: {name} ({type(module).__name__}) is not supported yet: its experts are not stored as "
                "gate_up_proj and down_proj. Use convert_hf_to_int4_direct.py, which needs no model."
            )
    return found


def _is_experts(module: Any) -> bool:
    """Whether it is all experts of a layer, as transformers stacks them: gate above up, rows are outputs."""
    import torch

    stacked = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(item, torch.nn.Parameter) and item.dim() == 3 for item in stacked):
        return False
    (_, doubled, size), (_, outputs, inner) = (item.shape for item in stacked)
    return (doubled, outputs) == (2 * inner, size) and hasattr(module, "act_fn")


def _expert(module: Any, name: str, number: int, names: set[str], group_size: int) -> tuple[_Matrix, _Matrix, _Matrix]:
    # Views: writing the quantized values changes the stacked tensor of the model.
    gate, up = module.gate_up_proj[number].chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj[number]}
    return tuple(  # type: ignore[return-value]
        _matrix(f"{name}.{number}.{part}.weight", weight, names, group_size) for part, weight in parts.items()
    )


def _matrix(name: str, weight: torch.Tensor, names: set[str], group_size: int) -> _Matrix:
    if name not in names:
        raise ConfigError(
            f"--input-dir: there is no {name}. Checkpoints with other names than those of transformers are not "
            "supported yet: use convert_hf_to_int4_direct.py."
        )
    if weight.shape[1] % group_size:
        raise ConfigError(f"--quant-group-size {group_size} does not divide the {weight.shape[1]} inputs of {name}.")
    return _Matrix(name, weight)


def _of_linear(matrix: _Matrix) -> Callable[..., None]:
    return lambda module, arguments: matrix.inputs.add(arguments[0])


def _of_experts(experts: list[tuple[_Matrix, _Matrix, _Matrix]]) -> Callable[..., None]:
    def add(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        hidden, chosen = arguments[0], arguments[1]
        for number, (gate, up, down) in enumerate(experts):
            # An expert is calibrated only on the tokens that the router sends to it.
            tokens = hidden[(chosen == number).any(dim=-1)]
            gate.inputs.add(tokens)
            down.inputs.add(module.act_fn(tokens @ gate.weight.T) * (tokens @ up.weight.T))

    for gate, up, _ in experts:
        # Both matrices read the same input. Sharing halves the memory and the work.
        up.inputs = gate.inputs
    return add


def _quantise_matrix(matrix: _Matrix, done: dict[str, list[torch.Tensor]], options: argparse.Namespace) -> float:
    """Quantize the matrix, also in the model. Returns its squared error divided by that of rounding to nearest."""
    import torch

    from slime.weight_sync.quantize import int4_scale, pack_int4, round_int4
    from tools.gptq import quantise, squared_error

    weight, products, size = matrix.weight, matrix.inputs.products, options.quant_group_size
    values, scales = quantise(weight, products, size, options.dampening_frac)
    new = (values * scales.float().repeat_interleave(size, 1)).to(weight.dtype)
    # The comparison rounds to nearest with the same group size, as a weight sync does.
    groups = weight.float().unflatten(1, (-1, size))
    nearest_scale = int4_scale(groups).to(weight.dtype)[..., None]
    nearest = (round_int4(groups, nearest_scale) * nearest_scale.float()).flatten(1)
    # The floor avoids a division by zero for a matrix that rounding reproduces exactly.
    share = squared_error(new - weight, products) / max(squared_error(nearest - weight, products), 1e-30)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    done[matrix.name] = [pack_int4(values).cpu(), scales.cpu(), shape]
    # Later layers are calibrated on this layer's quantized output.
    weight.copy_(new)
    return share


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
