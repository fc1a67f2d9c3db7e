"""The golden answers of ``slime doctor engine``: computed by transformers in float32 from the engine's checkpoint.

No file of answers is kept, so any family works that transformers knows. ``PRECISIONS`` holds every tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.backends import EVERY_RANK, NamedTensor, Recipients
from slime.backends.training.hf_files import TensorReader
from slime.data.processing import load_processor
from slime.models.lora import LoraConfig, tensor_name
from slime.utils.accelerator import allow_torchvision_on_cpu
from slime.utils.errors import DataError
from slime.weight_sync.probe import probe_ids

_TEXTS = (
    "The capital of France is Paris, and 12 + 30 = 42.",
    "def area(width, height):\n    return width * height\n",
    "Let x be a number such that 3x - 7 = 11. Then 3x = 18, so x = 6. We check: 3 * 6 - 7 = 11, as it must be.",
)
_LONGEST = 96  # tokens of a prompt
_MOST_KEPT = 12  # matrices of logits: a large vocabulary takes a gigabyte
# The checkpoint's weights times this are the second version. A power of two: no precision rounds the product.
FACTOR = 0.5
_ADAPTER_STD = 0.05


@dataclass(frozen=True)
class Precision:
    """Largest differences between an engine and transformers in float32 that rounding explains.

    Attributes:
        median, most: of log-probs, in nats.
        mass: of a sum of probabilities, at the border of a nucleus.
        flips: share of (token, layer) pairs with other experts.
    """

    median: float
    most: float
    mass: float
    flips: float


PRECISIONS = {
    # The order of sums differs. Seen on a CPU: 2e-7 and 3e-6. A GPU may multiply with 10 bits of mantissa (TF32).
    "float32": Precision(median=1e-4, most=1e-2, mass=1e-3, flips=0.002),
    # 10 bits of mantissa.
    "float16": Precision(median=0.01, most=0.25, mass=0.01, flips=0.05),
    # 7 bits. Two experts whose scores are close change places at some tokens, whose log-probs then differ more.
    "bfloat16": Precision(median=0.05, most=1.0, mass=0.05, flips=0.15),
}


@dataclass(frozen=True)
class Picture:
    """A prompt with an image.

    Attributes:
        text: with one placeholder for the image, as the engine gets it.
        image: PIL.
        inputs: of the transformers model: ``input_ids`` ``[1, L]``, pixels and their grid.
    """

    text: str
    image: Any
    inputs: Mapping[str, torch.Tensor]

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self.inputs["input_ids"][0]]


class Golden:
    """A model of transformers, and the trainer of one rank whose weights it has (``WeightExporter``).

    Args:
        dtype: of the engine. The weights are rounded to it, the computation is in float32.
        context: most tokens of prompt and response together.

    Raises:
        DataError: transformers cannot load the checkpoint.
    """

    is_weight_source = True

    def __init__(self, checkpoint: str, dtype: str = "float32", context: int = 128) -> None:
        self.checkpoint = checkpoint
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.precision = PRECISIONS[dtype]
        self.context = context
        self.model = _load(checkpoint, self.dtype)
        self.text_config = self.model.config.get_text_config()
        self.vocab_size = int(self.text_config.vocab_size)
        self.tokenizer = _tokenizer(checkpoint)
        self.processor = load_processor(checkpoint)
        self.factor = 1.0
        self.prompts = self._prompts()
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def _prompts(self) -> list[list[int]]:
        """Of several lengths: the engine computes them together."""
        limit = min(_LONGEST, self.context // 2)
        found = [probe_ids(self.vocab_size), probe_ids(self.vocab_size)[:3]]
        for text in _TEXTS if self.tokenizer is not None else ():
            ids = [token for token in self.tokenizer.encode(text, add_special_tokens=False) if token < self.vocab_size]
            found.append(ids[:limit])
        return [ids for ids in found if len(ids) > 1]

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a response."""
        for config in (self.model.generation_config, self.model.config, self.text_config):
            ids = None if config is None else config.eos_token_id
            if ids is not None:
                return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
        token = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return [] if token is None else [int(token)]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """``[L, V]``, float64. Row i predicts token i + 1."""
        key = tuple(ids)
        if key not in self._logits:
            if len(self._logits) >= _MOST_KEPT:
                self._logits.clear()
            self._logits[key] = self._forward({"input_ids": torch.tensor([key])})
        return self._logits[key]

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output = self.model(**inputs, use_cache=False)
        return output.logits[0, :, : self.vocab_size].double()  # type: ignore[no-any-return]

    def log_probs(self, ids: Sequence[int], start: int = 1, temperature: float = 1.0) -> torch.Tensor:
        """Of ``ids[start:]``."""
        return chosen(self.logits(ids)[start - 1 : -1] / temperature, ids[start:])

    def experts(self, ids: Sequence[int]) -> dict[int, torch.Tensor]:
        """Layer number -> the experts of every token, sorted, ``[L, topk]``. Empty for a dense model."""
        found: dict[int, torch.Tensor] = {}

        def note(layer: int) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                found[layer] = output[-1].reshape(-1, output[-1].shape[-1]).sort(-1).values

            return hook

        # transformers 5: the routers of all families return (logits, weights, indices)
        routers = [(name, part) for name, part in self.model.named_modules() if type(part).__name__.endswith("Router")]
        hooks = [part.register_forward_hook(note(_layer_of(name))) for name, part in routers]
        try:
            self._forward({"input_ids": torch.tensor([list(ids)])})
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def picture(self, image: Any) -> Picture:
        """A prompt with ``image``, from the checkpoint's chat template."""
        content = [{"type": "image", "image": image}, {"type": "text", "text": "what"}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Picture(text, image, dict(self.processor(text=[text], images=[image], return_tensors="pt")))

    def picture_log_probs(self, picture: Picture, response: Sequence[int]) -> torch.Tensor:
        """Of ``response``."""
        inputs = dict(picture.inputs)
        length = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([list(response)])], dim=1)
        for name, filler in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in inputs:
                more = inputs[name].new_full((1, len(response)), filler)
                inputs[name] = torch.cat([inputs[name], more], dim=1)
        return chosen(self._forward(inputs)[length - 1 : -1], response)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Make the weights the checkpoint's times ``factor``: all tensors alike, so names and layouts do not matter."""
        tensors = {value.data_ptr(): value for value in self.model.state_dict().values()}  # tied ones once
        for value in tensors.values():
            if value.is_floating_point():
                value.mul_(factor / self.factor)
        self.factor = factor
        self._logits.clear()

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        """The checkpoint's tensors times the factor of :meth:`scale`, under its names, in the engine's precision."""
        reader = TensorReader(self.checkpoint, "--model")
        names = reader.names
        tied = {"lm_head.weight"} if self.text_config.tie_word_embeddings else set()
        for name in sorted(names - tied, key=_fused_together):
            tensor = reader.get(name)
            yield name, (tensor * self.factor).to(self.dtype) if tensor.is_floating_point() else tensor

    def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        """None."""
        yield from ()

    def save_hf(self, path: str) -> None:
        raise NotImplementedError("the checkpoint's own files are loaded")

    def adapter(self, config: LoraConfig, names: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        """A random adapter of the layers whose last name is in ``names``, in float32, under peft's names."""
        draw = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in self.model.named_parameters():
            if name.split(".")[-2] in names and name.endswith(".weight"):
                rows, columns = weight.shape
                a = torch.randn(config.rank, columns, generator=draw) * columns**-0.5
                tensors[tensor_name(name, "A")] = a
                tensors[tensor_name(name, "B")] = torch.randn(rows, config.rank, generator=draw) * _ADAPTER_STD
        return tensors

    @torch.no_grad()
    def merge(self, adapter: Mapping[str, torch.Tensor], scale: float) -> None:
        """Add ``scale`` times the product of an adapter to the weights."""
        parameters = dict(self.model.named_parameters())
        for name, a in adapter.items():
            if name.endswith(".lora_A.weight"):
                weight = parameters[name.replace(".lora_A.weight", ".weight")]
                weight.add_(scale * (adapter[name.replace(".lora_A.", ".lora_B.")] @ a))
        self._logits.clear()


def chosen(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probs of one id per row of ``logits``."""
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def _load(checkpoint: str, dtype: torch.dtype) -> Any:
    allow_torchvision_on_cpu()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        sees = config.get_text_config() is not config
        auto: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager", trust_remote_code=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"--model {checkpoint}: transformers cannot load it: {error}") from None
    # only the weights are rounded, as in the engine: what is left is its own arithmetic
    return model.float().eval()


def _tokenizer(checkpoint: str) -> Any:
    """None for a checkpoint without one."""
    from slime.data.processing import load_tokenizer

    if not any((Path(checkpoint) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return load_tokenizer(checkpoint, trust_remote_code=True)


def context_of(checkpoint: str) -> int:
    """``max_position_embeddings`` of the text model."""
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return int(config.get("max_position_embeddings", 2048))


def _layer_of(name: str) -> int:
    """``model.layers.3.mlp.gate`` -> 3."""
    return int(name.rpartition("layers.")[2].partition(".")[0])


def _fused_together(name: str) -> tuple[str, int, str]:
    """Sorts tensors that engines fuse next to each other: q, k, v, and gate, up."""
    path, module, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", name, "")
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return path, order.index(module) if module in order else len(order), f"{module}.{kind}"
