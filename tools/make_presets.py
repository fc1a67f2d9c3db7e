"""Write ``scripts/models/*.sh`` and the table of ``docs/models/README.md`` from ``scripts/models/presets.yaml``.

    python tools/make_presets.py            write the files
    python tools/make_presets.py --check    exit with 1 and name the files that are out of date

A preset is sourced by a launch script and leaves two bash arrays: MODEL_ARGS, the model's Megatron flags, and
CKPT_ARGS, checkpoint flags from environment variables. Facts, flags and files are three steps here:
:func:`load_presets`, :func:`model_flags`, :func:`preset_script`. Imports nothing of slime.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "scripts" / "models"
FACTS = MODELS / "presets.yaml"
PAGE = ROOT / "docs" / "models" / "README.md"
MARKS = ("<!-- presets: begin, written by tools/make_presets.py -->", "<!-- presets: end -->")

Facts = dict[str, Any]

# Settings of a launch script that need no other script: fact -> environment variable.
KNOBS = {"layers": "MODEL_ARGS_NUM_LAYERS", "rope_base": "MODEL_ARGS_ROTARY_BASE"}
POSITIONS = {
    "legacy": "--use-rotary-position-embeddings",
    "rope": "--position-embedding-type rope",
    "rope_only": "--position-embedding-type rope --no-position-embedding",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FACT_NAMES = _names(
    "family like set knobs hf hf_type billions counts note spec layers hidden ffn heads groups head_dim vocab "
    "vocab_divisor tied qkv_bias output_gate position rope_base rope_share rope_interleaved rope_fusion llama3_scaling "
    "rope_factor max_position seq_length eps qk_norm zero_centered_norm post_norms mla moe mtp_layers extra"
)
MLA_NAMES = _names("q_lora kv_lora nope rope v mscale")
MOE_NAMES = _names(
    "experts dense ffn topk shared shared_gate score bias_rate balancing groups group_topk scale dispatcher drop_policy"
)


@dataclass(frozen=True)
class Preset:
    """One preset.

    Attributes:
        facts: everything known about the model, those of its family and of its parent included.
        parent: the preset whose script this one sources. None if the script lists the flags itself.
        own: facts in which it differs from ``parent``.
        variables: environment variables that it sets for ``parent``'s script.
    """

    name: str
    facts: Facts
    parent: str | None
    own: Facts
    variables: dict[str, int]


def load_presets(path: Path = FACTS) -> dict[str, Preset]:
    """The presets by name, in the order of the file.

    Raises:
        ValueError: a preset has a fact that nothing reads, names an unknown family or parent, or sets a fact that its
            parent's script has no knob for.
    """
    tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    presets: dict[str, Preset] = {}
    for name, own in (tables["families"] | tables["presets"]).items():
        for block, known in (("", FACT_NAMES), ("moe", MOE_NAMES), ("mla", MLA_NAMES)):
            # A misspelled fact would otherwise be dropped without a message.
            if unknown := (own if not block else own.get(block, {})).keys() - known:
                raise ValueError(f"{path.name}: {name}: nothing reads {block} {sorted(map(str, unknown))}")
    for name, own in tables["presets"].items():
        # In the order of the file: a parent must come before its variants.
        presets[name] = _variant(name, own, presets) if "like" in own else _full(name, own, tables["families"])
    return presets


def _full(name: str, own: Facts, families: dict[str, Facts]) -> Preset:
    family = own.get("family", "")
    if family and family not in families:
        raise ValueError(f"{FACTS.name}: preset {name}: no family {family!r}; there are {', '.join(families)}")
    return Preset(name, _merge(families.get(family, {}), own), None, own, {})


def _variant(name: str, own: Facts, presets: dict[str, Preset]) -> Preset:
    parent = presets.get(own["like"])
    if parent is None:
        raise ValueError(f"{FACTS.name}: preset {name}: like {own['like']!r} must name a preset above it")
    changed: Facts = own.get("set", {})
    if missing := changed.keys() - set(parent.facts.get("knobs", [])):
        raise ValueError(f"{FACTS.name}: preset {name} sets {sorted(missing)}, no knob of {parent.name}")
    # Knobs work in the parent's script only. Its note is about the parent.
    inherited = {key: value for key, value in parent.facts.items() if key not in ("knobs", "note")}
    # Another number of layers has another number of parameters.
    if changed.get("layers"):
        inherited.pop("billions", None)
    facts = _merge(inherited, {**{key: value for key, value in own.items() if key != "set"}, **changed})
    return Preset(name, facts, parent.name, own, {KNOBS[key]: value for key, value in changed.items()})


def _merge(base: Facts, more: Facts) -> Facts:
    """``more`` over ``base``, one level into the blocks. A null removes a fact of the base."""
    merged = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return {key: value for key, value in merged.items() if value is not None}


def model_flags(facts: Facts) -> list[str]:
    """The lines of MODEL_ARGS: each a flag with its values, as text for bash."""
    return [line for block in (_shape, _positions, _norms, _mla, _moe, _others) for line in block(facts) if line]


def _switch(facts: Facts, name: str, flag: str, wanted: bool = True) -> str:
    return flag if facts.get(name, not wanted) is wanted else ""


def _value(facts: Facts, name: str, flag: str) -> str:
    return f"{flag} {facts[name]}" if name in facts else ""


def _knob(facts: Facts, name: str, flag: str) -> str:
    """A flag whose value the script's environment may change."""
    if name in facts.get("knobs", []):
        return f'{flag} "${{{KNOBS[name]}:-{facts[name]}}}"'
    return _value(facts, name, flag)


def _shape(facts: Facts) -> Iterator[str]:
    if "spec" in facts:
        yield "--spec " + " ".join(facts["spec"])
    yield _knob(facts, "layers", "--num-layers")
    yield _value(facts, "hidden", "--hidden-size")
    yield _value(facts, "ffn", "--ffn-hidden-size")
    yield _value(facts, "heads", "--num-attention-heads")
    if "groups" in facts:
        yield "--group-query-attention"
        yield _value(facts, "groups", "--num-query-groups")
    yield _value(facts, "head_dim", "--kv-channels")
    yield _value(facts, "vocab", "--vocab-size")
    yield _value(facts, "vocab_divisor", "--make-vocab-size-divisible-by")
    yield "" if facts.get("tied") else "--untie-embeddings-and-output-weights"
    yield "--swiglu"
    yield "--disable-bias-linear"
    yield _switch(facts, "qkv_bias", "--add-qkv-bias")
    if facts.get("output_gate"):
        yield "--attention-output-gate"
        yield "--use-gated-attention"


def _positions(facts: Facts) -> Iterator[str]:
    yield POSITIONS[facts["position"]]
    yield _knob(facts, "rope_base", "--rotary-base")
    yield _value(facts, "rope_share", "--rotary-percent")
    yield _switch(facts, "rope_interleaved", "--rotary-interleaved")
    yield _switch(facts, "rope_fusion", "--no-rope-fusion", wanted=False)
    yield _switch(facts, "llama3_scaling", "--use-rope-scaling")
    yield _value(facts, "rope_factor", "--rotary-scaling-factor")
    yield _value(facts, "max_position", "--max-position-embeddings")
    yield _value(facts, "seq_length", "--seq-length")


def _norms(facts: Facts) -> Iterator[str]:
    yield "--normalization RMSNorm"
    yield _value(facts, "eps", "--norm-epsilon")
    yield _switch(facts, "qk_norm", "--qk-layernorm")
    yield _switch(facts, "zero_centered_norm", "--apply-layernorm-1p")
    if facts.get("post_norms"):
        yield "--post-self-attn-layernorm"
        yield "--post-mlp-layernorm"


def _mla(facts: Facts) -> Iterator[str]:
    mla = facts.get("mla")
    if mla is None:
        return
    yield "--multi-latent-attention"
    yield _value(mla, "q_lora", "--q-lora-rank")
    yield _value(mla, "kv_lora", "--kv-lora-rank")
    yield _value(mla, "nope", "--qk-head-dim")
    yield _value(mla, "rope", "--qk-pos-emb-head-dim")
    yield _value(mla, "v", "--v-head-dim")
    yield _value(mla, "mscale", "--mscale")
    yield _value(mla, "mscale", "--mscale-all-dim")


def _moe(facts: Facts) -> Iterator[str]:
    moe = facts.get("moe")
    if moe is None:
        return
    yield _value(moe, "experts", "--num-experts")
    yield f"--moe-layer-freq {_layer_freq(facts, moe['dense'])}"
    yield _value(moe, "ffn", "--moe-ffn-hidden-size")
    yield _value(moe, "topk", "--moe-router-topk")
    yield _value(moe, "shared", "--moe-shared-expert-intermediate-size")
    yield _switch(moe, "shared_gate", "--moe-shared-expert-gate")
    yield _value(moe, "score", "--moe-router-score-function")
    if moe["score"] == "sigmoid":  # these models choose experts by score + bias, then weigh them by the score alone
        yield "--moe-router-pre-softmax"
        yield "--moe-router-enable-expert-bias"
    yield _value(moe, "bias_rate", "--moe-router-bias-update-rate")
    yield _value(moe, "balancing", "--moe-router-load-balancing-type")
    yield "--moe-aux-loss-coeff 0"
    yield _value(moe, "groups", "--moe-router-num-groups")
    yield _value(moe, "group_topk", "--moe-router-group-topk")
    yield _value(moe, "scale", "--moe-router-topk-scaling-factor")
    yield "--moe-router-dtype fp32"
    yield _value(moe, "dispatcher", "--moe-token-dispatcher-type")
    yield _value(moe, "drop_policy", "--moe-token-drop-policy")
    yield "--moe-grouped-gemm"
    yield "--moe-permute-fusion"


def _layer_freq(facts: Facts, dense: int) -> str:
    """One 0 (dense) or 1 (experts) per layer, in Megatron's notation."""
    if "layers" in facts.get("knobs", []):
        # Bash computes the number of expert layers, because the environment may change the number of layers.
        return f'"[0]*{dense}+[1]*$((${{{KNOBS["layers"]}:-{facts["layers"]}}} - {dense}))"'
    leading = f"[0]*{dense}+" if dense else ""
    return f'"{leading}[1]*{facts["layers"] - dense}"'


def _others(facts: Facts) -> Iterator[str]:
    yield _value(facts, "mtp_layers", "--mtp-num-layers")
    yield from facts.get("extra", [])


_HERE = '"$(dirname -- "${BASH_SOURCE[0]}")'


def preset_script(preset: Preset) -> str:
    """The text of ``scripts/models/<name>.sh``."""
    lines = ["#!/usr/bin/env bash", "# shellcheck disable=SC2034  # the arrays are for the script that sources this"]
    lines += [f"# {line}" for line in _about(preset)]
    lines.append("# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.")
    if preset.parent is None:
        lines += ["MODEL_ARGS=(", *(f"   {flag}" for flag in model_flags(preset.facts)), ")", ""]
        lines += ["# shellcheck source=../lib/checkpoint.sh", f'source {_HERE}/../lib/checkpoint.sh"']
    else:
        # Assignments before "source" hold for this command, so that the parent's knobs take these values.
        setting = "".join(f"{name}={value} " for name, value in preset.variables.items())
        lines += [f"# shellcheck source=./{preset.parent}.sh", f'{setting}source {_HERE}/{preset.parent}.sh"']
        if "spec" in preset.own:
            lines += _replace_spec(*preset.own["spec"])
    return "\n".join(lines) + "\n"


def _replace_spec(module: str, function: str) -> list[str]:
    return [
        'for i in "${!MODEL_ARGS[@]}"; do',
        '   if [[ "${MODEL_ARGS[i]}" == --spec ]]; then',
        f"      MODEL_ARGS[i + 1]={module}",
        f"      MODEL_ARGS[i + 2]={function}",
        "   fi",
        "done",
        "unset i",
    ]


def _about(preset: Preset) -> list[str]:
    models = ", ".join(preset.facts["hf"])
    text = []
    if models:
        is_alias = not preset.own.keys() - {"like", "hf"}
        text.append(f"{models}: the same as {preset.parent}." if is_alias else f"{models}.")
    if "note" in preset.facts:
        text.append(preset.facts["note"])
    knobs = [KNOBS[name] for name in preset.facts.get("knobs", [])]
    if knobs:
        text.append(f"Set {' or '.join(knobs)} before sourcing to change it.")
    return textwrap.wrap(" ".join(text), 110)


def table(presets: dict[str, Preset]) -> str:
    """``docs/models/README.md`` with the table of the presets between its marks."""
    head = """\
| preset | model | parameters | layers | hidden | attention | experts | rope base | tied |
|---|---|---|---|---|---|---|---|---|
"""
    rows = "".join(f"| {' | '.join(_row(preset))} |\n" for preset in presets.values())
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{PAGE} needs the lines {MARKS[0]} and {MARKS[1]}")
    return f"{before}{begin}\n\n{head}{rows}\n{end}{after}"


def _row(preset: Preset) -> list[str]:
    facts = preset.facts
    moe = facts.get("moe")
    dense = ""
    if moe and moe["dense"]:
        dense = f", first {moe['dense']} layers dense" if moe["dense"] > 1 else ", first layer dense"
    return [
        f"`{preset.name}`",
        ", ".join(facts["hf"]) or facts.get("note", "").split(".")[0],
        f"{facts['billions']:g} B" if "billions" in facts else "",
        str(facts["layers"]),
        str(facts["hidden"]),
        _attention(facts),
        f"{moe['topk']} of {moe['experts']}{dense}" if moe else "",
        str(facts["rope_base"]),
        "yes" if facts.get("tied") else "no",
    ]


def _attention(facts: Facts) -> str:
    if facts["hf_type"] == "glm_moe_dsa":
        return f"MLA, sparse, {facts['heads']} heads"
    if "mla" in facts:
        return f"MLA, {facts['heads']} heads"
    kind = "gated delta net, gated " if facts.get("output_gate") else ""
    return f"{kind}GQA {facts['heads']}/{facts['groups']}"


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    presets = load_presets()
    scripts = {MODELS / f"{name}.sh": preset_script(preset) for name, preset in presets.items()}
    return {**scripts, PAGE: table(presets)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the model presets and their table.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when a file is out of date.")
    args = parser.parse_args()
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    surplus = sorted(set(MODELS.glob("*.sh")) - wanted.keys())
    if args.check:
        for path in [*stale, *surplus]:
            print(f"{path.relative_to(ROOT)} is out of date: run python tools/make_presets.py", file=sys.stderr)
        return 1 if stale or surplus else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    # Every .sh in this folder is generated: one without a preset is a leftover of a removed or renamed preset.
    for path in surplus:
        path.unlink()
    print(f"{len(wanted)} files, {len(stale)} written, {len(surplus)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
