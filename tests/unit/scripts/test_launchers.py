"""Every launch script, run dry: its recipe, consistent arithmetic, flags that the parser knows."""

from __future__ import annotations

import csv
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli import main
from slime.ray.arguments import parse_only
from slime.utils import accelerator
from tests.unit.scripts.bash_arrays import ROOT, model_words
from tests.unit.scripts.dry_run import SCRIPTS, Command, dry_run, dry_run_with_files, launchers
from tools.hub_configs import hub_config
from tools.make_presets import load_presets

with (Path(__file__).parent / "launchers.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = {row["script"]: row for row in csv.DictReader(_file)}

FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
# Column of the table -> flag with the same value. An empty cell means that the flag is absent.
VALUES = {
    "nodes": "--actor-num-nodes",
    "gpus": "--actor-num-gpus-per-node",
    "gpus_per_engine": "--rollout-num-gpus-per-engine",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "last": "--decoder-last-pipeline-num-layers",
    "first": "--decoder-first-pipeline-num-layers",
    "estimator": "--advantage-estimator",
    "eps_clip": "--eps-clip",
    "eps_clip_high": "--eps-clip-high",
    "prompts": "--rollout-batch-size",
    "global_batch": "--global-batch-size",
    "steps": "--num-steps-per-rollout",
    "cap": "--rollout-max-response-len",
    "tokens": "--max-tokens-per-gpu",
    "oversample": "--over-sampling-batch-size",
    "rm": "--rm-type",
    "prefill": "--prefill-num-servers",
    "temperature": "--rollout-temperature",
    "eval_samples": "--n-samples-per-eval-prompt",
    "eval_top_p": "--eval-top-p",
    "stop_ids": "--rollout-stop-token-ids",
    "loss_mask": "--loss-mask-type",
    "tis_low": "--tis-clip-low",
    "adam_beta2": "--adam-beta2",
    "sync_bytes": "--update-weight-buffer-size",
    "logprob_rows": "--log-probs-chunk-size",
}
SWITCHES = (
    *("use-kl-loss", "use-tis", "optimizer-cpu-offload", "moe-enable-deepep", "enable-mtp-training"),
    *("use-tensorboard", "use-wandb", "calculate-per-token-loss", "deterministic-mode"),
    *("no-offload-train", "no-offload-rollout"),
)
PRESETS = load_presets()
CUDA_GRAPH_SIZES = [1, 2, 4, 8, *range(16, 257, 8)]


@functools.cache
def command(script: str) -> Command:
    return dry_run(script, env={"BASE_DIR": "/base"})


@functools.cache
def size(script: str, flag: str, default: int = 1) -> int:
    return int(command(script).value(flag) or default)


def test_every_recipe_has_its_script_and_no_other_script_exists() -> None:
    assert launchers() == sorted(ROWS)


@pytest.mark.parametrize("script", ROWS)
def test_a_script_passes_the_values_of_its_recipe(script: str) -> None:
    row, made = ROWS[script], command(script)
    assert {column: made.value(flag) for column, flag in VALUES.items()} == {column: row[column] for column in VALUES}
    placement = {"colocate": [], "none": None}.get(row["engines"], [row["engines"]])
    flag = {"colocate": "--colocate", "none": "--debug-train-only"}.get(row["engines"], "--rollout-num-gpus")
    assert made.flags[flag] == (placement or [])
    assert made.entry == f"{ROOT}/{row['entry']}"
    assert {name for name in SWITCHES if f"--{name}" in made.flags} == set(row["switches"].split(", ")).intersection(
        SWITCHES
    )
    assert made.value("--dynamic-sampling-filter-path") == (FILTER if row["filter"] == "yes" else "")


@pytest.mark.parametrize("script", ROWS)
def test_a_script_passes_the_engine_flags_of_its_recipe_and_no_other(script: str) -> None:
    wanted = {}
    for item in filter(None, ROWS[script]["sglang"].split("; ")):
        name, _, value = item.partition(" ")
        wanted[f"--sglang-{name}"] = value.split()
    if "--sglang-cuda-graph-bs" in wanted:
        wanted["--sglang-cuda-graph-bs"] = [str(number) for number in CUDA_GRAPH_SIZES]
    if script == "run-glm5.2-744B-A40B.sh":
        wanted["--sglang-config"] = ["/base/outputs/glm5.2-744B-A40B/sglang.yaml"]
    made = {flag: values for flag, values in command(script).flags.items() if flag.startswith("--sglang-")}
    assert made == wanted


@pytest.mark.parametrize("script", ROWS)
def test_a_script_uses_its_preset_unchanged(script: str) -> None:
    words = model_words()[ROWS[script]["preset"]]
    argv = command(script).argv
    start = argv.index(words[0])
    assert argv[start : start + len(words)] == words


@pytest.mark.parametrize("script", ROWS)
def test_sizes_of_a_recipe_divide_each_other(script: str) -> None:
    world = size(script, "--actor-num-nodes") * size(script, "--actor-num-gpus-per-node")
    stages = size(script, "--pipeline-model-parallel-size")
    width = size(script, "--tensor-model-parallel-size") * size(script, "--context-parallel-size")
    assert world % (stages * width) == 0
    assert world % (stages * size(script, "--expert-model-parallel-size")) == 0
    first = size(script, "--decoder-first-pipeline-num-layers", 0)
    last = size(script, "--decoder-last-pipeline-num-layers", 0)
    middle = stages - bool(first) - bool(last)
    layers = size(script, "--num-layers") - first - last
    assert layers == 0 if middle == 0 else layers % middle == 0
    if "--num-experts" in command(script).flags:
        assert size(script, "--num-experts") % size(script, "--expert-model-parallel-size") == 0
    is_split = size(script, "--tensor-model-parallel-size") > 1
    assert ("--sequence-parallel" in command(script).flags) == is_split
    if "--debug-train-only" not in command(script).flags:
        rollout = size(script, "--rollout-num-gpus", world)
        assert rollout % size(script, "--rollout-num-gpus-per-engine") == 0
    samples = size(script, "--rollout-batch-size") * size(script, "--n-samples-per-prompt")
    assert samples % (size(script, "--global-batch-size", 0) or size(script, "--num-steps-per-rollout")) == 0


@pytest.mark.parametrize("script", ROWS)
def test_the_checks_of_train_py_accept_a_recipe(script: str, tmp_path: Path) -> None:
    made = dry_run_with_files(script, tmp_path, hub_config(PRESETS[ROWS[script]["preset"]].facts))
    args, problems = parse_only(made.argv, is_async=made.entry.endswith("train_async.py"))
    assert problems == []
    assert args is not None
    assert [str(notice) for notice in args.notices if "unknown flag" in str(notice)] == []


@pytest.mark.parametrize("script", ROWS)
def test_a_recipe_for_gpus_is_planned_on_a_machine_without_one(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = dry_run_with_files(script, tmp_path, hub_config(PRESETS[ROWS[script]["preset"]].facts))
    status = main(["plan", "--json", made.entry, *made.argv])
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == []
    assert status == 0
    assert plan["gaps"] == []
    assert plan["placement"]["num_nodes"] >= int(ROWS[script]["nodes"])
    if "--fp8-format" in made.flags and accelerator.current().is_cpu:
        assert any("needs a GPU" in text for text in plan["missing"])


def test_recipes_share_what_is_constant() -> None:
    for script, row in ROWS.items():
        made = command(script)
        assert made.flags.keys() >= {"--attention-dropout", "--hidden-dropout", "--save", "--load", "--hf-checkpoint"}
        assert made.value("--attention-dropout") == made.value("--hidden-dropout") == "0.0"
        assert made.value("--save-interval") == "20"
        assert made.value("--lr") == ("1e-6" if row["estimator"] else "1e-5")
        if row["estimator"]:
            assert made.value("--kl-loss-coef") == "0.00"
            assert made.value("--kl-loss-type") == "low_var_kl"
            assert made.value("--n-samples-per-prompt") == row["samples"]
            assert made.value("--num-rollout") == row["rollouts"]
        else:
            assert made.value("--num-epoch") == "3"
            assert made.value("--loss-type") == "sft_loss"


def test_special_hardware_and_precision_have_their_environment() -> None:
    nodes = {script for script in ROWS if "MASTER_ADDR" in command(script).environment}
    assert nodes == {script for script, row in ROWS.items() if int(row["nodes"]) > 1}
    for script in ROWS:
        environment = command(script).environment
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert environment["PYTHONPATH"] == str(ROOT)
        assert ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG" in environment) == script.endswith("-int4.sh")
        assert ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES" in environment) == script.endswith("-fp8.sh")
        if "--moe-enable-deepep" in command(script).flags:
            assert environment["NVSHMEM_DISABLE_NCCL"] == "1"
            assert command(script).value("--moe-token-dispatcher-type") == "flex"
    exact = command("run-qwen2.5-0.5B-reproducibility.sh").environment
    assert exact.items() >= {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}.items()
    assert "HIP_VISIBLE_DEVICES" in command("run-qwen3-4B-amd.sh").environment


def test_placement_follows_the_environment_where_a_recipe_says_so() -> None:
    env = {"ACTOR_NUM_NODES": "3", "ACTOR_NUM_GPUS_PER_NODE": "4", "CP_SIZE": "8"}
    made = dry_run("run-qwen3.5-27B.sh", env=env)
    assert (made.value("--actor-num-nodes"), made.value("--actor-num-gpus-per-node")) == ("3", "4")
    assert made.value("--context-parallel-size") == "8"
    assert dry_run("run-qwen3-4B.sh", env={"NUM_GPUS": "2"}).value("--actor-num-gpus-per-node") == "2"


def test_flags_behind_the_name_come_last_and_win() -> None:
    made = dry_run("run-qwen3-4B.sh", "--lr", "2e-6", "--custom-rm-path", "/a b.py:f")
    assert made.argv[-4:] == ["--lr", "2e-6", "--custom-rm-path", "/a b.py:f"]


def test_paths_come_from_the_environment() -> None:
    env = {"MODEL_DIR": "/m", "DATA_DIR": "/d d", "OUTPUT_DIR": "/o"}
    made = dry_run("run-glm4-9B.sh", env=env)
    assert made.value("--hf-checkpoint") == "/m/GLM-Z1-9B-0414"
    assert made.value("--prompt-data") == "/d d/dapo-math-17k/dapo-math-17k.jsonl"
    assert made.value("--load") == made.value("--save") == "/o/glm4-9B"
    assert "--ref-load" not in made.flags
    single = {"HF_CHECKPOINT": "/h", "REF_LOAD": "/r", "SAVE_DIR": "/s", "LOAD_DIR": "/l", "MATH_DATA": "/x.jsonl"}
    made = dry_run("run-glm4-9B.sh", env=env | single)
    paths = [made.value(f"--{name}") for name in ("hf-checkpoint", "ref-load", "save", "load", "prompt-data")]
    assert paths == ["/h", "/r", "/s", "/l", "/x.jsonl"]


def test_a_converted_checkpoint_beside_the_model_is_the_reference(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-4B_torch_dist").mkdir()
    made = dry_run("run-qwen3-4B.sh", env={"MODEL_DIR": str(tmp_path)})
    assert made.value("--ref-load") == str(tmp_path / "Qwen3-4B_torch_dist")


def test_quantised_engines_start_from_another_checkpoint_than_the_trainer() -> None:
    for script in ROWS:
        if script.endswith(("-int4.sh", "-fp8.sh")):
            assert command(script).value("--ref-load") not in ("", command(script).value("--hf-checkpoint"))


def test_wandb_is_used_on_request() -> None:
    assert "--use-wandb" not in command("run-qwen3-4B.sh").flags
    made = dry_run("run-qwen3-4B.sh", env={"WANDB_PROJECT": "my runs"})
    assert made.value("--wandb-project") == "my runs"
    assert made.value("--wandb-group") == "qwen3-4B"


def test_the_readme_lists_every_script() -> None:
    text = (SCRIPTS / "README.md").read_text()
    assert [script for script in launchers() if f"`{script}`" not in text] == []


def shell_files() -> list[str]:
    return sorted(str(path) for path in SCRIPTS.rglob("*.sh"))


def test_bash_parses_every_script() -> None:
    for path in shell_files():
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_shellcheck_has_nothing_to_say() -> None:
    program = Path(sys.executable).parent / "shellcheck"  # set-up installs it
    done = subprocess.run([program, *shell_files()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
