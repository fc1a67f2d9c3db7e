"""Tools that look at files: data sets, checkpoints, rollout dumps. Run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from slime.backends.training.checkpoint_files import checksums_of
from slime.backends.training.hf_export import write_marker
from slime.backends.training.hf_files import TensorReader
from slime.data.dump_file import save_debug_rollout_data
from slime.data.processing import tokenize_chat
from slime.data.sample import Sample
from slime.utils.errors import ConfigError
from tests.programs import run_program

_ROOT = Path(__file__).parents[3]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(f"tools/{tool}", *arguments)


TOOLS = {path.name for path in (_ROOT / "tools").glob("*.py")}
TOOLS -= {"torchvision_fix.py", "hub_configs.py", "gptq.py"}  # modules of other tools, no commands


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_every_tool_explains_itself_in_a_new_interpreter(tool: str):
    command = [sys.executable, f"tools/{tool}", "--help"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_a_data_set_is_looked_through_to_the_end(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "a b", "label": "1"},
        {"prompt": "a b", "label": "2"},
        {"label": "3"},
        {"prompt": 7, "label": 1},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n{broken\n")
    done = run("check_dataset.py", file, "--input-key", "prompt", "--label-key", "label")
    assert done.returncode == 1
    assert done.stdout.count("problem: ") == 2  # a prompt that is a number is for a function of the user
    assert f"{file}:3" in done.stdout  # no prompt
    assert f"{file}:5: not valid JSON" in done.stdout
    assert "4 rows, 2 problems" in done.stdout
    assert "1 prompts are there more than once" in done.stdout


def test_prompts_are_measured_in_the_model_s_tokens(tiny_task, tmp_path: Path):
    flags = ("--hf-checkpoint", tiny_task.model, "--apply-chat-template", "--input-key", "prompt")
    done = run("check_dataset.py", tiny_task.train, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prompt tokens: p0 " in done.stdout
    short = run("check_dataset.py", tiny_task.train, *flags, "--max-prompt-len", 1)
    assert short.returncode == 1
    assert "tokens are more than 1" in short.stdout


def save_checkpoint(directory: Path, **changes: torch.Tensor) -> Path:
    directory.mkdir()
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors | changes, directory / "model.safetensors")
    return directory


def test_a_checkpoint_s_tensors_are_listed_with_their_sizes(tmp_path: Path):
    done = run("inspect_checkpoint.py", save_checkpoint(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert "a  [2, 3]  F32" in done.stdout
    assert "2 tensors, 10 numbers" in done.stdout


def test_numbers_that_are_not_finite_are_found(tmp_path: Path):
    directory = save_checkpoint(tmp_path / "one", b=torch.tensor([1.0, float("nan")]))
    assert run("inspect_checkpoint.py", directory).returncode == 0
    done = run("inspect_checkpoint.py", directory, "--values")
    assert done.returncode == 1
    assert "1 NOT FINITE" in done.stdout
    assert run("inspect_checkpoint.py", directory, "--values", "--match", "a").returncode == 0


def test_two_checkpoints_differ_where_their_tensors_do(tmp_path: Path):
    one = save_checkpoint(tmp_path / "one")
    other = save_checkpoint(tmp_path / "two", a=torch.arange(6.0).view(2, 3) + 0.5, c=torch.zeros(1))
    done = run("inspect_checkpoint.py", one, "--compare", other)
    assert done.returncode == 1
    assert "a  max difference 5.000e-01 (largest value 5.500e+00), 100.00% of its numbers" in done.stdout
    assert "c  only in the second" in done.stdout
    assert "1 tensors are equal, 2 differ" in done.stdout
    assert run("inspect_checkpoint.py", one, "--compare", one).returncode == 0


def test_values_of_an_export_are_shown_if_its_files_have_their_checksums(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "export")
    write_marker(directory, checksums_of(directory.glob("*.safetensors")))
    assert run("inspect_checkpoint.py", directory, "--values").returncode == 0
    file = max(directory.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("inspect_checkpoint.py", directory, "--values")
    assert done.returncode != 0
    assert f"{directory} is damaged: {file.name} has the checksum" in done.stderr
    assert run("inspect_checkpoint.py", directory).returncode == 0


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path):
    done = run("inspect_checkpoint.py", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def make_dump(tmp_path: Path) -> Path:
    samples = []
    for index, reward in enumerate((1.0, {"score": 0.25, "format": True})):
        sample = Sample(group_index=0, index=index, prompt="1+1=", label="2")
        sample.tokens, sample.response, sample.response_length = [5, 6, 7], "2", 1
        sample.reward, sample.rollout_log_probs, sample.weight_versions = reward, [-0.5], ["3"]
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    path = save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), [samples], rollout_id=3, evaluation=False)
    assert path is not None
    return path


def test_a_dump_becomes_a_table_with_a_row_per_sample(tmp_path: Path):
    target = tmp_path / "samples.parquet"
    done = run("rollouts_to_parquet.py", make_dump(tmp_path), "--output", target, "--tokens")
    assert done.returncode == 0, done.stderr
    first, second = parquet.read_table(target).to_pylist()
    assert first["reward"] == 1.0
    assert (second["reward"], second["reward_format"]) == (0.25, 1.0)
    assert (first["tokens"], first["rollout_log_probs"], first["trained_tokens"]) == ([5, 6, 7], [-0.5], 1)
    assert (first["dump"], first["weight_versions"], first["status"]) == ("3.pt", ["3"], "completed")


def test_a_file_that_is_no_dump_leaves_no_table(tmp_path: Path):
    (tmp_path / "0.pt").write_text("nothing")
    done = run("rollouts_to_parquet.py", tmp_path / "0.pt", "--output", tmp_path / "samples.parquet")
    assert done.returncode == 2
    assert "is not a rollout dump" in done.stderr
    assert list(tmp_path.glob("*parquet*")) == []


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_a_checkpoint_in_8_bits_reads_back_as_bf16_within_its_precision(strategy: str, tiny_task, tmp_path: Path):
    fp8, bf16 = tmp_path / "fp8", tmp_path / "bf16"
    done = run("convert_hf_to_fp8.py", "--model-dir", tiny_task.model, "--save-dir", fp8, "--strategy", strategy)
    assert done.returncode == 0, done.stderr
    config = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    assert ("weight_block_size" in config) == (strategy == "block")
    if strategy == "channel":
        assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
        assert "lm_head" in config["ignore"]
        name = "model.layers.0.mlp.up_proj.weight"
        stored = load_file(fp8 / "model.safetensors")
        assert stored[name + "_scale"].shape == (stored[name].shape[0], 1)
    else:
        assert config["quant_method"] == "fp8"
        assert "model.embed_tokens" in config["modules_to_not_convert"]
    again = run("fp8_cast_bf16.py", "--input-fp8-hf-path", fp8, "--output-bf16-hf-path", bf16)
    assert again.returncode == 0, again.stderr
    assert "quantization_config" not in json.loads((bf16 / "config.json").read_text())
    original, back = (TensorReader(path, "--hf-checkpoint") for path in (tiny_task.model, bf16))
    assert original.names == back.names
    changed = [name for name in original.names if not torch.equal(original.get(name), back.get(name))]
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    for name in changed:
        before, after = original.get(name).float(), back.get(name).float()
        assert ((before - after).abs() <= before.abs() / 16 + before.abs().max() / 448 / 512).all()


def test_what_engines_hold_in_16_bits_and_stacked_experts_are_not_made_8_bits(tmp_path: Path):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text("{}")
    kept = {
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "mtp.fc.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.visual.blocks.0.mlp.linear_fc1.weight",
        "model.visual.merger.linear_fc2.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    }
    quantised = {
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    }
    save_file({name: torch.randn(4, 8) for name in kept | quantised}, source / "model.safetensors")
    done = run("convert_hf_to_fp8.py", "--model-dir", source, "--save-dir", tmp_path / "fp8")
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn} == quantised
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert set(config["modules_to_not_convert"]) == {name.removesuffix(".weight") for name in kept}
    save_file({"model.layers.0.mlp.experts.down_proj": torch.randn(2, 4, 8)}, source / "model.safetensors")
    refused = run("convert_hf_to_fp8.py", "--model-dir", source, "--save-dir", tmp_path / "stacked")
    assert refused.returncode == 2
    assert "model.layers.0.mlp.experts.down_proj holds all experts of a layer" in refused.stderr


def test_the_default_rules_leave_the_experts_only_in_4_bits(tmp_path: Path):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text("{}")
    experts = {"model.layers.0.mlp.experts.0.up_proj", "model.layers.0.block_sparse_moe.experts.0.w1"}
    others = ("mlp.gate", "block_sparse_moe.gate", "self_attn.q_proj", "linear_attn.out_proj", "eh_proj")
    kept = {f"model.layers.0.{name}" for name in others} | {"mtp.fc", "model.mtp_layers.0.input_proj"}
    weights = {f"{name}.weight": torch.randn(4, 32) for name in kept | experts}
    save_file(weights, source / "model.safetensors")
    done = run("convert_hf_to_int4_direct.py", "--model-dir", source, "--save-dir", tmp_path / "int4")
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "int4" / "model.safetensors")
    assert {name.removesuffix(".weight_packed") for name in stored if name.endswith("_packed")} == experts


def test_a_checkpoint_in_4_bits_reads_back_as_bf16_within_its_precision(tiny_task, tmp_path: Path):
    int4 = tmp_path / "int4"
    flags = ("--model-dir", tiny_task.model, "--save-dir", int4, "--group-size", 16)
    refused = run("convert_hf_to_int4_direct.py", *flags)
    assert refused.returncode == 2  # a dense model has no experts
    assert "leave no matrix" in refused.stderr
    rules = ("--ignore-rules", "lm_head", "embed", "norm", "q_proj$")
    done = run("convert_hf_to_int4_direct.py", *flags, *rules)
    assert done.returncode == 0, done.stderr
    config = json.loads((int4 / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["re:.*lm_head.*", "re:.*embed.*", "re:.*norm.*", "re:.*q_proj$"]
    again = run("convert_k2_thinking_int4_to_bf16.py", "--model-dir", int4)
    assert again.returncode == 0, again.stderr
    bf16 = tmp_path / "int4_bf16"
    assert "quantization_config" not in json.loads((bf16 / "config.json").read_text())
    original, back = (TensorReader(path, "--hf-checkpoint") for path in (tiny_task.model, bf16))
    assert original.names == back.names == TensorReader(int4, "--hf-checkpoint").names
    changed = [name for name in original.names if not torch.equal(original.get(name), back.get(name))]
    assert {name.split(".")[-2] for name in changed} >= {"k_proj", "down_proj"}
    assert not any("q_proj" in name or not name.endswith("_proj.weight") for name in changed)
    for name in changed:
        before, after = (reader.get(name).float().unflatten(1, (-1, 16)) for reader in (original, back))
        largest = before.abs().amax(-1, keepdim=True)
        assert ((before - after).abs() <= largest / 7.5 * 0.51 + largest / 128).all()


def test_some_files_of_a_checkpoint_in_4_bits_are_converted_with_another_config(tmp_path: Path):
    source, other = tmp_path / "int4", tmp_path / "other.json"
    source.mkdir()
    packed, scale, shape = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, 1), torch.tensor([2, 32])
    quantised = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_shape": shape}
    save_file(quantised | {"a.bias": torch.ones(2)}, source / "model-1.safetensors")
    save_file({"b.weight": torch.ones(2)}, source / "model-2.safetensors")
    weight_map = dict.fromkeys((*quantised, "a.bias"), "model-1.safetensors") | {"b.weight": "model-2.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text('{"model_type": "kimi_k2", "quantization_config": {}}')
    other.write_text('{"model_type": "deepseek_v3", "quantization_config": {"bits": 4}}')
    tool = ("convert_k2_thinking_int4_to_bf16.py", "--model-dir", source)
    done = run(*tool, "--files", "model-1.safetensors", "--config-path", other)
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "int4_bf16" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "a.weight": torch.bfloat16,
        "a.bias": torch.float32,
    }
    assert json.loads((tmp_path / "int4_bf16" / "config.json").read_text()) == {"model_type": "deepseek_v3"}
    refused = run(*tool, "--overwrite", "--files", "model-3.safetensors")
    assert (refused.returncode, "no tensor is in model-3.safetensors" in refused.stderr) == (2, True)
    refused = run(*tool, "--overwrite", "--config-path", tmp_path / "none.json")
    assert (refused.returncode, "--config-path" in refused.stderr) == (2, True)


def test_gptq_writes_what_transformers_loads_and_leaves_less_error_than_rounding(tiny_task, tmp_path: Path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = {"gptq": tmp_path / "gptq", "rounded": tmp_path / "rounded"}
    flags = ("--data-dir", tiny_task.train, "--num-calibration-samples", 24, "--quant-group-size", 32)
    done = run("convert_hf_to_int4.py", "--input-dir", tiny_task.model, "--output-dir", paths["gptq"], *flags)
    assert done.returncode == 0, done.stderr
    rules = ("--ignore-rules", "lm_head", "embed", "norm")
    flags = ("--model-dir", tiny_task.model, "--save-dir", paths["rounded"], "--group-size", 32, "--max-workers", 2)
    assert run("convert_hf_to_int4_direct.py", *flags, *rules).returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    # Texts of the calibration: on other tokens the gain is within the noise.
    rows = map(json.loads, Path(tiny_task.train).read_text().splitlines()[:24])
    ids = torch.tensor([tokenize_chat(tokenizer, row["prompt"])[:12] for row in rows])
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(tiny_task.model).eval()(ids).logits
        loaded = {name: AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits for name, path in paths.items()}
        model = AutoModelForCausalLM.from_pretrained(tiny_task.model).eval()
        reader = TensorReader(paths["gptq"], "--hf-checkpoint")
        model.load_state_dict({name: reader.get(name).float() for name in reader.names}, strict=False)
        assert (model(ids).logits - loaded["gptq"]).abs().max() < 0.02  # the reader's weights are bf16
    error = {name: float((logits - exact).square().mean()) for name, logits in loaded.items()}
    assert error["gptq"] < error["rounded"], error
    flags = ("--output-dir", tmp_path / "again", "--data-dir", tiny_task.train)
    again = run("convert_hf_to_int4.py", "--input-dir", paths["gptq"], *flags)
    assert again.returncode == 2
    assert "is quantised already" in again.stderr


def test_gptq_refuses_what_it_cannot_do(tiny_task, tmp_path: Path):
    flags = ("--input-dir", tiny_task.model, "--output-dir", tmp_path, "--data-dir", tiny_task.train)
    done = run("convert_hf_to_int4.py", *flags, "--quant-type", "W8A16", "--dampening-frac", 0)
    assert done.returncode == 2
    assert "--quant-type W8A16 is not supported yet" in done.stderr
    assert "--dampening-frac 0.0 must be greater than 0" in done.stderr
    assert f"--output-dir {tmp_path} exists already" in done.stderr


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a.weight_zero_point": torch.zeros(1, dtype=torch.int32)}, "asymmetric"),
        ({"a.weight_packed": torch.zeros(2, 4, dtype=torch.int32)}, "not 4 bits"),
    ],
)
def test_other_packings_are_refused_by_name(extra: dict[str, torch.Tensor], message: str, tmp_path: Path):
    tensors = {
        "a.weight_packed": torch.zeros(2, 2, dtype=torch.int32),
        "a.weight_scale": torch.ones(2, 1),
        "a.weight_shape": torch.tensor([2, 16]),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path, "--hf-checkpoint")
    assert reader.names == {"a.weight"}
    with pytest.raises(ConfigError, match=message):
        reader.get("a.weight")


def test_a_directory_that_exists_is_not_written_over(tiny_task, tmp_path: Path):
    done = run("convert_hf_to_fp8.py", "--model-dir", tiny_task.model, "--save-dir", tmp_path)
    assert done.returncode == 2
    assert f"--save-dir {tmp_path} exists already" in done.stderr
