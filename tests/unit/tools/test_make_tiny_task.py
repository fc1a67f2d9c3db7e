"""The tiny task: loads like any checkpoint, leaks nothing from evaluation to training, depends on its seed only."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from examples.demo.reward import reward_func
from slime.data.sample import Sample
from tools.make_tiny_task import TinyTask, main, make_tiny_task


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_makes_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_task(tmp_path / name, seed=seed)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    differing = {name for name in a if a[name] != c[name]}
    assert differing == {"model/model.safetensors", "sft.jsonl", "train.jsonl", "eval.jsonl"}


def test_the_command_decides_about_layers_their_weights_and_words(tmp_path: Path, monkeypatch) -> None:
    flags = ["--layers", "1", "--init-std", "0.1", "--words", "one", "two"]
    monkeypatch.setattr(sys, "argv", ["make_tiny_task.py", "--output", str(tmp_path), *flags])
    main()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["initializer_range"]) == (1, 0.1)
    assert {"one", "two"} < json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"].keys()
    assert load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"].std() > 0.09


def test_the_three_sets_are_disjoint_and_together_all_problems(tiny_task: TinyTask) -> None:
    questions = [
        [record["prompt"][0]["content"] for record in read(path)]
        for path in (tiny_task.sft, tiny_task.train, tiny_task.eval)
    ]
    assert [len(part) for part in questions] == [4000, 3844, 256]
    assert len(set().union(*questions)) == 90 * 90


def test_every_label_is_the_sum(tiny_task: TinyTask) -> None:
    for path in (tiny_task.sft, tiny_task.train, tiny_task.eval):
        for record in read(path):
            a, b = record["prompt"][0]["content"].removesuffix("=").split("+")
            assert record["label"] == str(int(a) + int(b))
            assert [message["role"] for message in record["prompt"]] == ["user", "assistant"][: len(record["prompt"])]
    assert all(len(record["prompt"]) == 1 for record in read(tiny_task.train))


def test_the_teacher_of_the_warm_start_forgets_most_carries_and_makes_no_other_mistake(tiny_task: TinyTask) -> None:
    num_carries = num_forgotten = 0
    for record in read(tiny_task.sft):
        assert record["messages"] == record["prompt"]
        question, answer = (message["content"] for message in record["prompt"])
        a, b = (int(text) for text in question.removesuffix("=").split("+"))
        has_carry = a % 10 + b % 10 >= 10
        num_carries += has_carry
        num_forgotten += int(answer) == a + b - 10
        assert int(answer) in ({a + b, a + b - 10} if has_carry else {a + b})
    assert 0.4 < num_carries / 4000 < 0.5
    assert 0.77 < num_forgotten / num_carries < 0.83


def test_a_careful_teacher_makes_no_mistake(tmp_path: Path) -> None:
    task = make_tiny_task(tmp_path, forgotten_carries=0)
    assert all(record["prompt"][-1]["content"] == record["label"] for record in read(task.sft))


def test_the_tokenizer_round_trips_and_the_template_is_short(tiny_task: TinyTask) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    question = read(tiny_task.train)[0]["prompt"]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert text == f"<|im_start|>user\n{question[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert len(ids) == 14
    assert tokenizer.unk_token_id not in ids
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<pad>")
    answered = tokenizer.apply_chat_template(
        [*question, {"role": "assistant", "content": "46"}], tokenize=True, return_dict=False
    )
    assert answered[: len(ids)] == ids
    assert answered[len(ids) :] == tokenizer.encode("46<|im_end|>\n")


def test_transformers_finds_every_weight_and_the_model_is_tiny(tiny_task: TinyTask) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(tiny_task.model, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 3
    logits = model(torch.tensor([[2, 5, 31, 8]])).logits
    assert logits.shape == (1, 4, model.config.vocab_size)
    assert logits.std() < 1  # random weights prefer nothing


def test_sets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_sft 8000 and num_eval 100"):
        make_tiny_task(tmp_path, num_sft=8000, num_eval=100)


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        ("46", "completed", 1.0),
        ("46", "truncated", 0.0),
        ("47", "completed", 0.0),
        ("460", "completed", 0.0),
        ("", "pending", 0.0),
    ],
)
def test_the_reward_is_one_for_the_right_number_and_nothing_else(response: str, status: str, reward: float) -> None:
    sample = Sample(response=response, label="46", status=Sample.Status(status))
    assert asyncio.run(reward_func(Namespace(), sample)) == reward
