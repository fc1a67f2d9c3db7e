"""The presets against the architecture facts, a separate table in this file, and as bash."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from slime.cli import main
from tests.unit.scripts.bash_arrays import MODELS, ROOT, model_words, source
from tools.hub_configs import hub_config
from tools.make_presets import FACTS, files, load_presets, model_flags

with (Path(__file__).parent / "model_presets.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = {row["preset"]: row for row in csv.DictReader(_file)}

# Column -> flag that takes the column's value. Defaults, marked with a word in brackets, are not passed.
VALUES = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "kv_groups": "--num-query-groups",
    "head_dim": "--kv-channels",
    "ffn": "--ffn-hidden-size",
    "norm_eps": "--norm-epsilon",
    "rope_base": "--rotary-base",
    "rope_percent": "--rotary-percent",
    "vocab": "--vocab-size",
    "vocab_divisor": "--make-vocab-size-divisible-by",
    "max_position": "--max-position-embeddings",
    "experts": "--num-experts",
    "moe_ffn": "--moe-ffn-hidden-size",
    "topk": "--moe-router-topk",
    "shared_expert_size": "--moe-shared-expert-intermediate-size",
    "score_function": "--moe-router-score-function",
    "bias_update_rate": "--moe-router-bias-update-rate",
    "load_balancing": "--moe-router-load-balancing-type",
    "aux_coeff": "--moe-aux-loss-coeff",
    "groups": "--moe-router-num-groups",
    "group_topk": "--moe-router-group-topk",
    "scaling_factor": "--moe-router-topk-scaling-factor",
    "router_dtype": "--moe-router-dtype",
    "dispatcher": "--moe-token-dispatcher-type",
    "drop_policy": "--moe-token-drop-policy",
    "q_lora": "--q-lora-rank",
    "kv_lora": "--kv-lora-rank",
    "qk_nope_dim": "--qk-head-dim",
    "qk_rope_dim": "--qk-pos-emb-head-dim",
    "v_dim": "--v-head-dim",
    "mtp_layers": "--mtp-num-layers",
}
SWITCHES = {
    "qkv_bias": ["--add-qkv-bias"],
    "qk_norm": ["--qk-layernorm"],
    "zero_centered_norm": ["--apply-layernorm-1p"],
    "post_norms": ["--post-self-attn-layernorm", "--post-mlp-layernorm"],
    "rope_interleaved": ["--rotary-interleaved"],
    "rope_fusion_off": ["--no-rope-fusion"],
    "shared_gate": ["--moe-shared-expert-gate"],
    "pre_softmax": ["--moe-router-pre-softmax"],
    "expert_bias": ["--moe-router-enable-expert-bias"],
    "output_gate": ["--attention-output-gate", "--use-gated-attention"],
}
EVERY_PRESET = {"--swiglu": "", "--disable-bias-linear": "", "--normalization": "RMSNorm"}


def expected(row: dict[str, str]) -> dict[str, str]:
    """The flags of one row of the table, and their values."""
    flags = dict(EVERY_PRESET)
    for column, flag in VALUES.items():
        if row[column] and "(" not in row[column] and row[column] != "unset":
            flags[flag] = row[column]
    for column, names in SWITCHES.items():
        if row[column] == "yes":
            flags |= dict.fromkeys(names, "")
    if row["kv_groups"]:
        flags["--group-query-attention"] = ""
    if row["attention"].startswith("MLA"):
        flags["--multi-latent-attention"] = ""
    if row["tied_embeddings"] == "no":
        flags["--untie-embeddings-and-output-weights"] = ""
    if row["spec_plugin"]:
        flags["--spec"] = row["spec_plugin"].replace(":", " ")
    if row["mscale"]:
        flags["--mscale"], flags["--mscale-all-dim"] = row["mscale"].split("/")
    if row["experts"]:
        flags["--moe-layer-freq"] = "0" * int(row["dense_layers"]) + "1" * int(row["moe_layers"])
    scaling = row["rope_scaling"].replace("llama3 rope scaling", "use-rope-scaling")
    for words in "; ".join([row["position_flags"], scaling, row["other_flags"]]).split("; "):
        if words:
            name, _, value = words.partition(" ")
            flags[f"--{name}"] = value
    return {flag: number(value) for flag, value in flags.items()}


def read(words: list[str]) -> dict[str, str]:
    """MODEL_ARGS as flag -> value."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in flags, f"{word} twice"
            values = flags.setdefault(word, [])
        else:
            values.append(word)
    if "--moe-layer-freq" in flags:
        layers = eval(flags["--moe-layer-freq"][0], {"__builtins__": {}})
        flags["--moe-layer-freq"] = ["".join(map(str, layers))]
    return {flag: number(" ".join(values)) for flag, values in flags.items()}


def number(text: str) -> str:
    """1e-5 and 1e-05 are one value. A layer pattern stays unchanged."""
    try:
        return text if text.startswith("0") else repr(float(text))
    except ValueError:
        return text


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_passes_exactly_the_flags_of_its_model(name: str) -> None:
    assert read(model_words()[name]) == expected(ROWS[name])


@pytest.mark.parametrize("name", sorted(load_presets()))
def test_the_flags_of_a_preset_agree_with_the_config_of_its_model_and_are_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_config(load_presets()[name].facts)))
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1+1=", "label": "2"}\n')
    run = f"--hf-checkpoint {tmp_path} --prompt-data {data} --label-key label --rm-type math --num-rollout 1"
    size = "--rollout-batch-size 8 --n-samples-per-prompt 8 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    assert main(["plan", "--json", "train.py", *model_words()[name], *run.split(), *size.split()]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == plan["gaps"] == []
    assert plan["stages"][0]["weights"] > 0


def test_the_names_of_the_older_documents_exist_with_the_right_shapes() -> None:
    words = model_words()
    assert words["glm4.6-355B-A32B"] == words["glm4.7-355B-A32B"] == words["glm4.5-355B-A32B"]
    assert words["deepseek-r1"] == words["deepseek-v3"]
    assert words["moonlight-16B-A3B"] == words["moonlight"]
    small, large = read(words["llama3-8B"]), read(words["llama3-70B"])
    scaled = read(words["llama3.1-8B-Instruct"])
    assert scaled.pop("--use-rope-scaling") == ""
    assert scaled.pop("--rotary-scaling-factor") == "8.0"
    assert scaled | {"--max-position-embeddings": "8192.0"} == small
    differing = {flag: value for flag, value in large.items() if small[flag] != value}
    assert differing == {
        "--num-layers": "80.0",
        "--hidden-size": "8192.0",
        "--ffn-hidden-size": "28672.0",
        "--num-attention-heads": "64.0",
    }


def test_the_generated_files_are_current() -> None:
    wanted = files()
    stale = [path.name for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    assert stale == [], "run python tools/make_presets.py"
    assert set(MODELS.glob("*.sh")) == {path for path in wanted if path.suffix == ".sh"}


def test_a_fact_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "presets.yaml"
    path.write_text(FACTS.read_text().replace("qk_norm: true", "qk_nrom: true", 1))
    with pytest.raises(ValueError, match="qk_nrom"):
        load_presets(path)


def test_a_variant_may_change_only_what_its_parent_has_a_knob_for(tmp_path: Path) -> None:
    path = tmp_path / "presets.yaml"
    path.write_text(FACTS.read_text().replace("set: {rope_base: 5000000}", "set: {layers: 5}"))
    with pytest.raises(ValueError, match=r"qwen3-4B-Instruct-2507 sets \['layers'\]"):
        load_presets(path)


def test_the_facts_of_a_variant_are_those_that_its_script_ends_with() -> None:
    for name, preset in load_presets().items():
        plain = {key: value for key, value in preset.facts.items() if key != "knobs"}
        words = [word.strip('"') for line in model_flags(plain) for word in line.split()]
        assert read(words) == read(model_words()[name])


@pytest.mark.parametrize("name", ["qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen3-235B-A22B"])
def test_the_rope_base_can_be_set_from_outside(name: str) -> None:
    print_it = f'source scripts/models/{name}.sh; echo "${{MODEL_ARGS[*]}}"'
    assert "--rotary-base 777 " in source(print_it, env={"MODEL_ARGS_ROTARY_BASE": "777"})


def test_the_depth_of_deepseek_can_be_set_from_outside_and_a_cut_leaves_no_trace() -> None:
    show = 'echo "${MODEL_ARGS[*]}"'
    cut = source(f"source scripts/models/deepseek-v3.sh; {show}", env={"MODEL_ARGS_NUM_LAYERS": "7"})
    assert "--num-layers 7 " in cut
    assert "--moe-layer-freq [0]*3+[1]*4 " in cut
    after = source(f"source scripts/models/deepseek-v3-5layer.sh; source scripts/models/deepseek-v3.sh; {show}")
    assert "--num-layers 61 " in after


def test_presets_can_be_sourced_from_any_directory(tmp_path: Path) -> None:
    shown = source(f'source {MODELS}/qwen3-4B-Instruct-2507.sh; echo "${{MODEL_ARGS[*]}}"', cwd=tmp_path)
    assert "--rotary-base 5000000" in shown
    shown = source('source qwen3-4B-Instruct-2507.sh; echo "${MODEL_ARGS[*]}"', cwd=MODELS)
    assert "--rotary-base 5000000" in shown


def test_arrays_may_be_expanded_without_quotes() -> None:
    """Older launch scripts expand them so: no word has a space, and no layer pattern names a file."""
    for name in ("deepseek-v3", "qwen3-30B-A3B", "glm4-9B"):
        show = 'printf "%s\n" ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}'
        words = source(f"source scripts/models/{name}.sh; {show}", env={"HF_CHECKPOINT": "/m"}).split()
        assert words == [*model_words()[name], "--hf-checkpoint", "/m"]


SHOW_CKPT = 'source scripts/models/llama3-8B.sh; printf "%s|" ${CKPT_ARGS[@]+"${CKPT_ARGS[@]}"}'


def test_checkpoint_flags_are_empty_without_variables() -> None:
    assert source(SHOW_CKPT) == "|"  # printf with nothing to print


def test_checkpoint_flags_come_from_the_environment_and_keep_spaces() -> None:
    env = {"HF_CHECKPOINT": "/m/my model", "REF_LOAD": "/r", "LOAD_DIR": "/l", "SAVE_DIR": "/s"}
    assert source(SHOW_CKPT, env=env) == (
        "--hf-checkpoint|/m/my model|--ref-load|/r|--load|/l|--save|/s|--save-interval|20|"
    )
    assert source(SHOW_CKPT, env={"SAVE_DIR": "/s", "SAVE_INTERVAL": "7"}) == "--save|/s|--save-interval|7|"


def test_checkpoint_flags_of_the_launcher_win_and_those_of_an_earlier_preset_do_not() -> None:
    assert source(f"CKPT_ARGS=(--hf-checkpoint /own)\n{SHOW_CKPT}", env={"HF_CHECKPOINT": "/env"}) == (
        "--hf-checkpoint|/own|"
    )
    again = f"HF_CHECKPOINT=/old\nsource scripts/models/qwen3-4B.sh\nHF_CHECKPOINT=/new\n{SHOW_CKPT}"
    assert source(again) == "--hf-checkpoint|/new|"


def test_presets_say_that_they_are_for_bash() -> None:
    assert all(path.read_text().startswith("#!/usr/bin/env bash\n") for path in MODELS.glob("*.sh"))


def test_one_shell_can_source_every_preset_in_turn() -> None:
    names = " ".join(sorted(model_words()))
    show = 'echo "${#MODEL_ARGS[@]}"'
    counts = source(f"for name in {names}; do source scripts/models/$name.sh; {show}; done").split()
    assert counts == [str(len(model_words()[name])) for name in sorted(model_words())]


def test_the_page_of_presets_names_every_preset() -> None:
    page = (ROOT / "docs" / "models" / "README.md").read_text()
    assert all(f"`{name}`" in page for name in model_words())
