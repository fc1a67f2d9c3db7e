"""Multi-token prediction against a layer of ``transformers``, and its loss against a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, packed_logits, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB
from tests.verification import verify

_LENGTHS = (7, 1, 40, 2)


pytestmark = pytest.mark.usefixtures("megatron_groups")


def _load(path: Path, **overrides: Any) -> Any:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    model = build_family_model(path, mtp_num_layers=1, **overrides)
    load_weights(model, shape_of(path), str(path), "--hf-checkpoint")
    return model


def _sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in _LENGTHS]


def _reference(kind: str, model: Any, path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[L, VOCAB]`` of depth 1: position i sees the decoder's state i and token i + 1, or 0 after the last."""
    tensors = saved_tensors(path)
    following = torch.cat([tokens[1:], tokens.new_zeros(1)])[None]
    hidden = model.model(tokens[None]).last_hidden_state
    embedding = model.model.embed_tokens(following)
    prefix = "model.mtp_layers.0." if kind == "mimo" else "model.layers.3."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], model.config.rms_norm_eps)

    if kind == "mimo":
        joined = torch.cat([norm("hidden_layernorm", hidden), norm("token_layernorm", embedding)], dim=-1)
        x = F.linear(joined, own["input_proj.weight"])
    else:
        joined = torch.cat([norm("enorm", embedding), norm("hnorm", hidden)], dim=-1)
        x = F.linear(joined, own["eh_proj.weight"])
    layer = model.model.layers[-1]
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(_fused_experts(own, kept))
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
    x = layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(x, positions),
    )
    layer.load_state_dict(kept)
    last = "final_layernorm" if kind == "mimo" else "shared_head.norm"
    return model.lm_head(norm(last, x[0] if isinstance(x, tuple) else x))[0]


def _hybrid_reference(model: Any, path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The same for Qwen3.5: the prediction layer has full attention, norms multiply with 1 + their weight."""
    text = model.model.language_model
    tensors = saved_tensors(path)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + tensors[f"mtp.{name}.weight"], text.config.rms_norm_eps)

    following = torch.cat([tokens[1:], tokens.new_zeros(1)])[None]
    hidden = text(tokens[None]).last_hidden_state
    embedding = text.embed_tokens(following)
    joined = torch.cat([norm("pre_fc_norm_embedding", embedding), norm("pre_fc_norm_hidden", hidden)], dim=-1)
    layer = copy.deepcopy(text.layers[text.config.layer_types.index("full_attention")])
    prefix = "mtp.layers.0."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    layer.load_state_dict(_fused_experts(own, layer.state_dict()))
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
    x = F.linear(joined, tensors["mtp.fc.weight"])
    x = layer(x, attention_mask=mask, position_embeddings=text.rotary_emb(x, positions))
    return model.lm_head(norm("norm", x))[0]


def _fused_experts(own: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer's tensors as ``transformers`` holds them in memory: experts stacked."""
    state = {name: value for name, value in own.items() if name in like}
    if "mlp.experts.gate_up_proj" in like:
        count = like["mlp.experts.gate_up_proj"].shape[0]
        part = {x: [own[f"mlp.experts.{e}.{x}_proj.weight"] for e in range(count)] for x in ("gate", "up", "down")}
        pairs = zip(part["gate"], part["up"], strict=True)
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state["mlp.experts.down_proj"] = torch.stack(part["down"])
    return state


def _predictions(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    from slime.backends.megatron_utils.model import gpt

    seen: list[tuple[torch.Tensor, dict[str, Any]]] = []
    original = model._postprocess

    def postprocess(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append((hidden_states, kwargs))
        return original(hidden_states, **kwargs)

    model._postprocess = postprocess
    packed_logits(model, sequences)
    model._postprocess = original
    with torch.no_grad():
        (state,) = gpt.predicted_hidden_states(model, *seen[0])
        return gpt._logits(model, state)[:, :VOCAB]


@pytest.mark.parametrize("kind", ["mimo", "glm4_moe", "deepseek_v3", "qwen3_5_moe"])
def test_the_predictions_of_the_second_next_token_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_family_checkpoint(kind, tmp_path)
    model = _load(tmp_path)
    sequences = _sequences()
    with torch.no_grad():
        if kind == "qwen3_5_moe":
            parts = [_hybrid_reference(reference, tmp_path, tokens) for tokens in sequences]
        else:
            parts = [_reference(kind, reference, tmp_path, tokens) for tokens in sequences]
        expected = torch.cat(parts)
    assert (_predictions(model, sequences) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["mimo", "glm4_moe", "deepseek_v3", "qwen3_5_moe"])
def test_prediction_layers_come_back_bit_for_bit_and_change_no_logits(kind: str, tmp_path: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights
    from tests.unit.megatron_utils.family_models import shape_of

    reference = make_family_checkpoint(kind, tmp_path)
    model = _load(tmp_path)
    exported = dict(export_weights(model, shape_of(tmp_path), layout_of=str(tmp_path)))
    saved = {name: value for name, value in saved_tensors(tmp_path).items() if not name.startswith("model.visual.")}
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    tokens = _sequences()[2]
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert (packed_logits(model, [tokens]) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("per_token", [False, True])
def test_only_prediction_layers_learn_from_the_prediction_loss(per_token: bool, tmp_path: Path) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from slime.backends.megatron_utils.model.attention import packed_segments

    make_family_checkpoint("mimo", tmp_path)
    model = _load(tmp_path, calculate_per_token_loss=per_token, mtp_loss_scaling_factor=0.2)
    sequences = _sequences()
    starts = torch.tensor([0, *_LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # the trained positions: those whose next token is one of the last three of its sequence
    masks = [torch.tensor([float(i + 1 < n and i + 1 >= n - 3) for i in range(n)]) for n in _LENGTHS]
    segments = packed_segments(starts, max(_LENGTHS))
    segments.prediction_mask, segments.vocab_size = torch.cat(masks)[None], VOCAB
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    expected = []
    for tokens, mask, row in zip(sequences, masks, _predictions(model, sequences).split(list(_LENGTHS)), strict=True):
        log_probs = row.double().log_softmax(-1)
        for i in range(len(tokens) - 2):  # position i predicts token i + 2, trained if position i + 1 is
            if mask[i + 1]:
                expected.append(-log_probs[i, tokens[i + 2]])
    total = torch.stack(expected).sum() * 0.2 / (1 if per_token else len(expected))

    losses: list[torch.Tensor] = []
    apply = MTPLossAutoScaler.apply
    tokens, positions = torch.cat(sequences)[None], torch.cat([torch.arange(n) for n in _LENGTHS])[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPLossAutoScaler, "apply", lambda hidden, loss: (losses.append(loss), apply(hidden, loss))[1])
        logits = model(tokens, positions, None, packed_seq_params=segments)
    summed = losses[0].sum().item()
    verify("loss of prediction layers (MTP)", "a loop over tokens", summed, total.item(), tolerance=1e-5, scale="mixed")

    (logits * 0).sum().backward()  # the decoder's own loss has no gradient: whatever arrives is the prediction's
    for name, parameter in model.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert has_gradient == name.startswith("mtp."), name
