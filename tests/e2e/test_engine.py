"""One real SGLang server: the log-probabilities it reports, and the weights it is sent."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
import torch
from PIL import Image

from examples.tiny import tools
from examples.tiny.tools import make_tool_model
from examples.tiny.vision import as_text, make_vision_model
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.service import run_app_in_thread
from slime.agent.trajectory import TurnRecord
from slime.algorithms.logprobs import SamplingMask, log_probs_and_entropy
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.router import Router, RouterProcess, remove_worker
from slime.backends.sglang_utils.server_args import server_env
from slime.backends.sglang_utils.topology import override_argv, read_topology
from slime.data.engine_fields import sampled_tokens
from slime.data.processing import load_tokenizer, render_chat
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.rollout.sglang_rollout import generate as rollout_generate
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils.async_utils import Deadline, run, wait_until
from slime.utils.errors import EngineError
from slime.utils.net import free_port
from slime.utils.process import GuardedProcess
from slime.weight_sync.root_hash import places_of
from slime.weight_sync.send_distributed import DistributedSender
from slime.weight_sync.session import WeightUpdate, push_weights
from tests.e2e.engines import LocalFleet, assert_all_compared, make_engine, proof_of
from tests.unit.rollout.fake_engine import make_args

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(tiny_task, fork_server, tmp_path_factory):
    engine = make_engine(tiny_task, fork_server, tmp_path_factory.mktemp("engine") / "log")
    engine.start()
    yield engine
    engine.stop()


def model_of(task: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)


def generate(engine: SGLangEngine, ids: list[int]) -> tuple[list[int], list[float], str]:
    parameters = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
    response = httpx.post(f"{engine.url}/generate", json=body, timeout=600).raise_for_status().json()
    pairs = response["meta_info"]["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], response["meta_info"]["weight_version"]


@torch.no_grad()
def worst_difference(model: Any, ids: list[int], output: list[int], log_probs: list[float]) -> float:
    logits = model(torch.tensor([ids + output])).logits[0].log_softmax(-1)
    expected = logits[len(ids) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]
    return (expected - torch.tensor(log_probs)).abs().max().item()


def test_an_engine_with_pipeline_stages_serves_what_transformers_computes(tiny_task, fork_server, tmp_path):
    engine = make_engine(tiny_task, fork_server, tmp_path / "log", "--pp-size", "2")
    model = model_of(tiny_task)
    try:
        engine.start()
        prompts = [[5 + i, 6 + i, 7] for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda ids: generate(engine, ids), prompts))
        for ids, (output, log_probs, _) in zip(prompts, answers, strict=True):
            assert worst_difference(model, ids, output, log_probs) < 1e-5
        assert engine.num_requests() == 0
        assert engine.is_responsive(600)
    finally:
        engine.stop()


def test_an_engine_that_keeps_its_weights_sends_images_to_an_encoder_that_already_runs(fork_server, tmp_path):
    model, picture = tmp_path / "model", as_text(Image.new("RGB", (24, 16), (200, 90, 50)))
    make_vision_model(model)
    task, port = SimpleNamespace(model=str(model)), free_port()
    url = f"http://127.0.0.1:{port}"
    flags = f"--model-path {model} --encoder-only --encoder-transfer-backend zmq_to_scheduler --device cpu"
    argv = f"{flags} --dtype float32 --port {port} --host 127.0.0.1 --skip-server-warmup".split()
    log, limit = tmp_path / "encoder.log", Deadline(600, "the encoder")
    command = [sys.executable, "-m", "sglang.launch_server", *argv]
    encoder = GuardedProcess(command, log_path=log, env=server_env())
    config = tmp_path / "engines.yaml"
    config.write_text(
        "sglang: [{name: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1, overrides: "
        f"{{language_only: true, encoder_transfer_backend: zmq_to_scheduler, encoder_urls: [{url}]}}}}]}}]"
    )
    (place,) = read_topology(str(config), hf_checkpoint=str(model), num_gpus_per_engine=1).places(str(model))["ref"]
    engines = [
        make_engine(task, fork_server, tmp_path / f"{number}.log", *flags)
        for number, flags in enumerate([[], override_argv(place.overrides)])
    ]
    try:
        wait_until(lambda: is_healthy(url), limit)
        for engine in engines:
            engine.start()
        text = "<|vision_start|><|image_pad|><|vision_end|>what"
        parameters = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        body = {"text": text, "image_data": [picture], "sampling_params": parameters, "return_logprob": True}
        whole, divided = (httpx.post(f"{e.url}/generate", json=body, timeout=600).json()["meta_info"] for e in engines)
        assert whole["prompt_tokens"] == divided["prompt_tokens"] > 4
        a, b = (torch.tensor([pair[0] for pair in meta["output_token_logprobs"]]) for meta in (whole, divided))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    finally:
        for server in (encoder, *engines):
            server.stop()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 4000), (1.0, 5), (0.9, 8)])
def test_the_ids_that_a_cut_vocabulary_leaves_are_told_and_give_the_log_probabilities_of_the_cut(
    engine, tiny_task, top_p, top_k
):
    ids = [5, 6, 7, 8]
    parameters = {"max_new_tokens": 16, "temperature": 0.7, "ignore_eos": True, "top_p": top_p, "top_k": top_k}
    asks = {"return_logprob": True, "return_sampling_mask": True}
    body = {"input_ids": ids, "sampling_params": parameters} | asks
    meta = httpx.post(f"{engine.url}/generate", json=body, timeout=600).raise_for_status().json()["meta_info"]
    sample = Sample(tokens=list(ids))
    tokens, log_probs = sampled_tokens(meta)
    sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info=meta)
    sizes = torch.as_tensor(sample.rollout_top_p_token_offsets).diff()
    assert sizes.min() >= 1
    assert 1 < sizes.float().mean() <= top_k
    with torch.no_grad():
        logits = model_of(tiny_task)(torch.tensor([sample.tokens])).logits[0, len(ids) - 1 : -1]
    mask = SamplingMask.of([sample.rollout_top_p_token_ids], [sample.rollout_top_p_token_offsets])
    expected, _ = log_probs_and_entropy(logits, torch.tensor(tokens), temperature=0.7, keep=mask)
    torch.testing.assert_close(expected, torch.tensor(log_probs), atol=1e-5, rtol=0)


def test_a_stream_makes_the_sample_that_one_reply_makes(engine, tiny_task):
    args = make_args(tiny_task.model, urlsplit(engine.url).port)
    GenerateState.clear_instances()
    try:
        samples = []
        for function in (rollout_generate, generate_streaming):
            sample = Sample(index=0, prompt="12+34=")
            run(function(args, sample, {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}))
            samples.append(sample)
        whole, streamed = samples
        assert streamed.response_length == 24
        assert (streamed.tokens, streamed.response) == (whole.tokens, whole.response)
        assert streamed.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-5)
        assert (streamed.status, streamed.weight_versions) == (whole.status, whole.weight_versions)
    finally:
        GenerateState.clear_instances()


GUIDES = [ROOT / "docs" / "en" / "get_started" / name for name in ("quick_start.md", "customization.md")]


@pytest.mark.parametrize("function", [None, "slime.rollout.sglang_streaming_rollout.generate_streaming"])
@pytest.mark.parametrize("ends", ["eos", "stop_token_ids"])
def test_the_rewards_of_the_guides_pay_for_a_right_answer(engine, tiny_task, tmp_path, function, ends):
    args = make_args(tiny_task.model, urlsplit(engine.url).port, custom_generate_function_path=function)
    GenerateState.clear_instances()
    try:
        state = GenerateState(args)
        greedy = {"temperature": 0.0, "no_stop_trim": True, "skip_special_tokens": False}
        greedy["spaces_between_special_tokens"] = False
        free = Sample(index=0, prompt="12+34=")
        run(rollout_generate(args, free, greedy | {"max_new_tokens": 8, "ignore_eos": True}))
        written = free.tokens[-8:]
        if ends == "eos":
            # the engine is made to write two tokens and then the end-of-turn token
            end, count = state.tokenizer.eos_token_id, 2
            params = greedy | {"max_new_tokens": 8, "min_new_tokens": 2, "logit_bias": {str(end): 1000.0}}
        else:
            count = next(i for i in range(1, 8) if written[i] not in written[:i])
            end = written[count]
            params = greedy | {"max_new_tokens": 8, "stop_token_ids": [end]}
        answer = state.tokenizer.decode(written[:count])
        for guide in GUIDES:
            (snippet,) = re.findall(r"```python\n((?:async )?def reward_func\(.*?)```", guide.read_text(), re.DOTALL)
            (tmp_path / f"{guide.stem}.py").write_text(snippet)
            args.custom_rm_path = f"{tmp_path}/{guide.stem}.py:reward_func"
            labels = [answer.strip(), "other"]
            group = [Sample(index=i, prompt="12+34=", label=label) for i, label in enumerate(labels)]
            right, wrong = run(generate_and_rm_group(args, group, params))
            assert right.tokens[-1] == end
            assert right.response_length == len(right.rollout_log_probs) == len(right.loss_mask) == count + 1
            assert right.response == answer
            assert (right.reward, wrong.reward) == (1.0, 0.0)
    finally:
        GenerateState.clear_instances()


def ask_openai(url: str, options: dict[str, Any], end_of_grammar: Any) -> str:
    """A tool call and its result as responses, then a chat completion. Returns the text after the result."""
    client = openai.OpenAI(base_url=f"{url}/v1", **options)
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    first = client.responses.create(model="m", input="rose?", tools=[look])
    (called,) = first.output
    assert (called.name, called.arguments) == ("look", '{"at": "amber"}')
    end_of_grammar()
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "mint"}
    again = {"model": "m", "input": [result], "previous_response_id": first.id, "tools": [look]}
    *_, last = client.responses.create(**again, stream=True)
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "iris?"}])
    assert chat.choices[0].finish_reason == "length"
    return str(last.response.output_text)


def ask_anthropic(url: str, options: dict[str, Any], end_of_grammar: Any) -> str:
    client = anthropic.Anthropic(base_url=url, **options)
    ask = {"model": "m", "max_tokens": 80, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    messages: list[Any] = [{"role": "user", "content": "rose?"}]
    first = client.messages.create(**ask, messages=messages)
    (called,) = first.content
    assert (called.name, called.input) == ("look", {"at": "amber"})
    end_of_grammar()
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "mint"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(**ask, messages=messages) as stream:
        return str(stream.get_final_text())


def test_real_clients_call_tools_and_every_sampled_token_is_trained_as_it_was_sampled(fork_server, tmp_path):
    model = make_tool_model(tmp_path)
    engine = make_engine(SimpleNamespace(model=model), fork_server, tmp_path / "log", "--context-length", "500")
    tokenizer, used = load_tokenizer(model), tools.call("look", at="amber")
    calls = [{"function": {"name": "look", "arguments": {"at": "amber"}}}]
    held = [{"role": "user", "content": "rose?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    held.append({"role": "tool", "content": "mint"})
    options = {"api_key": "s", "max_retries": 0, "_strict_response_validation": True}
    free, servers = {"max_new_tokens": 8, "ignore_eos": True}, []
    try:
        engine.start()
        for kind, ask in ((OpenAIAdapter, ask_openai), (AnthropicAdapter, ask_anthropic)):
            turns: list[TurnRecord] = []
            adapter = kind(
                tokenizer=tokenizer,
                sglang_url=engine.url,
                needs_session=True,
                debug_callback=lambda *values, turns=turns: turns.append(values[-1]),
            )
            servers.append(run_app_in_thread(adapter.app))
            # A random model calls the tool because a grammar forces it to. Then it writes as it likes.
            adapter.open_session("s", sampling_defaults={"regex": re.escape(used), "max_new_tokens": 80})
            said = ask(
                f"http://127.0.0.1:{servers[-1].port}",
                options,
                lambda a=adapter: vars(a.store["s"]).update(sampling_defaults=free),
            )
            sample, *_ = run(adapter.finish_session("s", base_sample=Sample(index=0)))
            response = sample.tokens[-sample.response_length :]
            trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
            assert trained == turns[0].output_ids + turns[1].output_ids
            assert tokenizer.decode(sample.tokens[:-8]) == render_chat(tokenizer, held, add_generation_prompt=True)
            assert sample.response.endswith(said)
            assert "rendered_whole" not in sample.metadata
            log_probs, network = sample.rollout_log_probs[-8:], model_of(SimpleNamespace(model=model))
            assert worst_difference(network, sample.tokens[:-8], sample.tokens[-8:], log_probs) < 1e-5
    finally:
        for server in servers:
            server.stop()
        engine.stop()


def sync(engine: SGLangEngine, model: str, weights: list[tuple[str, torch.Tensor]]) -> int:
    """Send ``weights`` as version 41 and compare all tensors of the engine. Returns the number of bytes."""
    fleet = LocalFleet([engine])
    sender = DistributedSender(fleet, group_name="test", timeout_s=600)
    sender.connect("127.0.0.1", free_port())
    try:
        proof = proof_of(model)
        update = WeightUpdate("41", max_chunk_bytes=1 << 20, timeout_s=600, proof=proof)
        num_bytes = push_weights(fleet, sender, weights, update, root=proof.begin(places_of(fleet.engines, (), 0)))
        assert_all_compared(engine, proof)
        return num_bytes
    finally:
        sender.disconnect()


def test_a_weight_sync_changes_every_tensor_and_stamps_the_version(engine, tiny_task):
    model = model_of(tiny_task)
    engine.reset_weights()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    num_bytes = sync(engine, tiny_task.model, weights)
    assert num_bytes == sum(tensor.numel() * 4 for _, tensor in weights)
    output, log_probs, version = generate(engine, [9, 10, 11])
    assert version == "41"
    assert worst_difference(model, [9, 10, 11], output, log_probs) < 1e-5


def test_a_refused_call_names_engine_verb_and_answer(engine):
    with pytest.raises(EngineError, match=r"engine 0 .* refused end_weight_update: status 400"):
        engine.end_weight_update()


def test_an_engine_does_not_take_another_server_on_its_port_for_its_own(tiny_task, fork_server, engine, tmp_path):
    taken = int(engine.url.rsplit(":", 1)[1])
    with pytest.raises(EngineError, match=r"(?s)engine 0 .* died .*address already in use"):
        make_engine(tiny_task, fork_server, tmp_path / "log", port=taken).start()


def test_the_fork_server_survives_clients_that_vanish_or_keep_silent(tiny_task, fork_server, tmp_path):
    wait_until(Path(fork_server.socket_path).exists, Deadline(600, "the fork server to listen"))
    with socket.socket(socket.AF_UNIX) as vanishing:
        vanishing.connect(fork_server.socket_path)
    request = {"argv": ["--model-path", "/nowhere"], "env": {}, "log": str(tmp_path / "lost")}
    with socket.socket(socket.AF_UNIX) as impatient:
        impatient.connect(fork_server.socket_path)
        impatient.sendall(json.dumps(request).encode() + b"\n")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(fork_server.socket_path)
        another = make_engine(tiny_task, fork_server, tmp_path / "log")
        another.start()
        another.stop()
    fork_server.raise_if_dead()


def test_the_router_learns_and_forgets_an_engine_whatever_the_proxy(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    router = RouterProcess("127.0.0.1", None, request_timeout_s=600, log_path=tmp_path / "log")
    try:
        router.wait_ready()
        engine.register(router.url)
        assert known(router) == [engine.url]
        remove_worker(router.url, engine.url)
        wait_until(lambda: known(router) == [], Deadline(600, "the router to forget the engine"))
    finally:
        router.stop()


def known(router: Router) -> list[str]:
    return [worker["url"] for worker in httpx.get(f"{router.url}/workers", trust_env=False).json()["workers"]]


def test_a_server_that_is_gone_is_an_engine_error_from_every_call(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.backends.sglang_utils.engine._REGISTER_TIMEOUT_S", 0.5)
    port = free_port()
    gone = SGLangEngine(EngineSpec(3, "127.0.0.1", port, [], {}, tmp_path / "log"))
    calls = [
        gone.weight_version,
        gone.num_requests,
        gone.pause_generation,
        lambda: gone.destroy_weights_update_group("g"),
        lambda: gone.register(f"http://127.0.0.1:{port}"),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=r"engine 3 .*ConnectError"):
            call()


INSIDE_SGLANG = """
import json, sys
import sglang, torch
from slime.backends.sglang_utils.cpu_platform import platform
from tools import make_engine_options as options

tables = {"server_options.json": options.server_table(), "router_options.json": options.router_table()}
torch.get_device_module()
before = torch.get_device_module
platform._default_device_module()
once = torch.get_device_module
platform._default_device_module()
print(json.dumps({
    "stale": [n for n, t in tables.items() if (options.TARGET / n).read_text(encoding="utf-8") != options.text_of(t)],
    "is_patched_once": before is not once and torch.get_device_module is once,
    "default_is_cpu": once() is torch.cpu and once("cuda") is torch.cuda,
}))
"""


@pytest.fixture(scope="module")
def seen_inside_sglang() -> dict[str, Any]:
    """Facts that only a process with SGLang imported can check. One process for all: the import takes seconds."""
    command = [sys.executable, "-c", INSIDE_SGLANG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_tables_of_options_are_those_of_the_installed_versions(seen_inside_sglang):
    assert seen_inside_sglang["stale"] == [], "run python tools/make_engine_options.py"


def test_the_default_device_is_the_cpu_even_in_a_build_for_gpus(seen_inside_sglang):
    assert seen_inside_sglang["is_patched_once"]
    assert seen_inside_sglang["default_is_cpu"]


def test_the_socket_directory_goes_with_the_fork_server(tmp_path):
    server = ForkServer(tmp_path / "log", server_env())
    directory = Path(server.socket_path).parent
    assert directory.exists()
    server.stop()
    assert not directory.exists()


def test_a_server_that_cannot_start_shows_its_last_log_lines(tiny_task, fork_server, tmp_path):
    broken = make_engine(tiny_task, fork_server, tmp_path / "log", "--attention-backend", "no_such_backend")
    with pytest.raises(EngineError, match=r"(?s)engine 0 .* died with status 2.*no_such_backend"):
        broken.start()
