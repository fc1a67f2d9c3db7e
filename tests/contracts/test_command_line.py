"""The commands that people bring, word for word: real paths are all that is added.

Values that a command omits are derived. E19, the converter, has separate tests. E21 and E22 are the presets and launch
scripts.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.backends.sglang_utils.namespace import read_engine
from slime.config.parse import parse
from slime.ray.arguments import GROUPS, parse_only
from tests.unit.config.tiny_command import QWEN3, make_model
from tests.unit.scripts.bash_arrays import model_words
from tests.unit.scripts.dry_run import dry_run, launchers

QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}

MODEL = "--hf-checkpoint {model} --prompt-data {prompts}"
"""The real paths: the only words that are added to the commands, except for E13: a stream needs --num-rollout."""

COMMANDS = {
    "E1": "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo "
    "--use-kl-loss --kl-loss-coef 0.001 --prompt-data {prompts} --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--global-batch-size 256 --num-rollout 3000 ${MODEL_ARGS} ${CKPT_ARGS}",
    "E2": "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo "
    "--use-kl-loss --kl-loss-coef 0.001 --prompt-data {prompts} --input-key prompt --label-key label "
    "--apply-chat-template --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
    "--num-rollout 3000 --save-interval 100 --eval-interval 50 ${MODEL_ARGS}",
    "E3": f"train_async.py {MODEL} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
    "--advantage-estimator grpo --async-buffer-size 4",
    "E3-interval": f"train_async.py {MODEL} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
    "--advantage-estimator grpo --async-buffer-size 4 --update-weights-interval 2",
    "E4": f"train.py {MODEL} --custom-generate-function-path custom_generate.py --max-turns 5",
    "E5": f"train.py {MODEL} --colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4",
    "E6": f"train.py {MODEL} --custom-rm-path custom_rm_class.py",
    "E7": f"train.py {MODEL} --custom-rm-path custom_rm.py --group-rm",
    "E8": f"train.py {MODEL} --eval-prompt-data aime {{prompts}} --eval-prompt-data gsm8k {{prompts}} "
    "--n-samples-per-eval-prompt 16 --eval-interval 50 --eval-temperature 0.0",
    "E9": f"train.py {MODEL} --sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO "
    "--sglang-tp-size 2 --sglang-disable-cuda-graph",
    "E10-tis": f"train.py {MODEL} --use-tis --tis-threshold 0.9",
    "E10-policy": f"train.py {MODEL} --true-on-policy-mode",
    "E11": f"train.py {MODEL} --use-fault-tolerance --sglang-mem-fraction-static 0.85 --rollout-batch-size 16",
    "E12": f"train.py {MODEL} --recompute-activations --micro-batch-size 1 --sequence-parallel",
    "E12-full": f"train.py {MODEL} --recompute-granularity full",
    "E13": f"train.py {MODEL} --num-rollout 3000 --num-data-workers 4 --streaming-data",
    "E14": f"train.py --train-backend fsdp {MODEL} --gradient-checkpointing --context-parallel-size 2",
    "E15": f"train.py {MODEL} --over-sampling-batch-size 64 --rollout-batch-size 32 --dynamic-sampling-filter-path "
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "E16": f"train.py {MODEL} --custom-generate-function-path my_module.generate --custom-rm-path "
    "my_module.reward_func --metadata-key metadata",
    "E17": f"train.py {MODEL} --custom-rm-path my_module:my_reward_func --custom-generate-function-path "
    "my_module:my_generate --dynamic-sampling-filter-path my_module:my_filter",
    "E18": f"train.py {MODEL} --sglang-server-concurrency 160 --sglang-cuda-graph-bs 1 2 4 8 "
    + " ".join(map(str, range(16, 257, 8))),
    "E20": f"ray job submit --address=http://127.0.0.1:8265 --runtime-env-json={{{{}}}} -- python3 "
    f"train.py {MODEL} --actor-num-nodes 8 --actor-num-gpus-per-node 8",
}

_COMMON = {"--rollout-batch-size", "--num-rollout", "--rm-type", "--rollout-max-response-len"}
_LEFT_OUT = _COMMON | {"--n-samples-per-prompt", "--rollout-num-gpus"}
WARNED: dict[str, set[str]] = {
    "E1": {"--kl-loss-type", "--rm-type", "--rollout-max-response-len"},
    "E2": {"--kl-loss-type", "--rm-type", "--rollout-max-response-len", "--eval-interval 50", "--save"},
    "E3": _COMMON | {"--n-samples-per-prompt"},
    "E3-interval": _COMMON | {"--n-samples-per-prompt"},
    "E5": _COMMON | {"--n-samples-per-prompt"},
}
"""Command -> the flags that it omits, each with a warning. The other commands omit at most _LEFT_OUT."""

FILES = {
    "custom_generate.py": "async def custom_generate(args, samples, evaluation=False): return samples\n",
    "custom_rm.py": "async def batched_custom_rm(args, samples): return [0.0 for _ in samples]\n",
    "custom_rm_class.py": "class CustomRewardModel:\n    def __init__(self, model_path): pass\n"
    "    def compute_reward(self, prompts, responses): return [0.0 for _ in responses]\n",
    "my_module.py": "async def generate(args, sample, sampling_params): return sample\n"
    "my_generate = generate\ndef reward_func(args, sample, **kwargs): return 0.0\nmy_reward_func = reward_func\n"
    "def my_filter(args, samples, **kwargs): return True\n",
}


@dataclass(frozen=True)
class Place:
    """A working directory with everything that the commands name."""

    model: str
    prompts: str

    def words(self, text: str) -> list[str]:
        words: list[str] = []
        for word in shlex.split(text.format(model=self.model, prompts=self.prompts)):
            match word:
                case "$MODEL_ARGS":
                    words += model_words()["qwen3-4B"]
                case "$CKPT_ARGS":
                    words += ["--hf-checkpoint", self.model]
                case _:
                    words.append(word)
        return words


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text((json.dumps({"prompt": "1+1=", "label": "2"}) + "\n") * 32)  # enough for an epoch
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Place(make_model(tmp_path / "model", QWEN3 | QWEN3_4B), str(prompts))


def command_of(name: str, place: Place) -> tuple[list[str], bool]:
    """(flags, whether the driver is the asynchronous one)."""
    words = place.words(COMMANDS[name].replace("${MODEL_ARGS}", "$MODEL_ARGS").replace("${CKPT_ARGS}", "$CKPT_ARGS"))
    driver = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[driver + 1 :], words[driver] == "train_async.py"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "E2"])
def test_a_command_works_with_nothing_changed_but_paths(name: str, place: Place):
    flags, is_async = command_of(name, place)
    args, problems = parse_only(flags, is_async=is_async)
    assert problems == []
    assert args is not None
    warned = {notice.flag for notice in args.notices if notice.level == "warning"}
    assert warned <= WARNED.get(name, _LEFT_OUT)


def test_e2_without_any_checkpoint_names_the_missing_flag(place: Place):
    flags, _ = command_of("E2", place)
    _, problems = parse_only(flags)
    assert problems == ["--hf-checkpoint is required: the Hugging Face directory of the model to train."]
    args, problems = parse_only([*flags, "--hf-checkpoint", place.model])
    assert problems == []
    assert args is not None
    assert {notice.flag for notice in args.notices if notice.level == "warning"} == WARNED["E2"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("E3", (8, 256, 1, 8)),
        ("E4", (8, 256, 1, 8)),
        ("E5", (8, 256, 1, 8)),
        ("E11", (8, 128, 1, 8)),
        ("E20", (8, 256, 1, 64)),
    ],
)
def test_a_short_command_gets_a_group_and_engines(name: str, values: tuple[int, ...], place: Place):
    flags, is_async = command_of(name, place)
    args, _ = parse_only(flags, is_async=is_async)
    assert args is not None
    sizes = (args.n_samples_per_prompt, args.global_batch_size, args.num_steps_per_rollout, args.rollout_num_gpus)
    assert sizes == values


def unknown_flags(words: list[str]) -> list[str]:
    args = parse(words, GROUPS, read_engine=read_engine)
    return [notice.flag for notice in args.notices if notice.text.startswith("unknown flag")]


@pytest.mark.parametrize("preset", sorted(model_words()))
def test_e21_every_word_of_a_preset_is_known(preset: str):
    assert unknown_flags(model_words()[preset]) == []


@pytest.mark.parametrize("script", launchers())
def test_e22_every_flag_of_a_launch_script_is_known(script: str):
    assert unknown_flags(dry_run(script).argv) == []
