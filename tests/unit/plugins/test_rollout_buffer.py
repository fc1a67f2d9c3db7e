"""The rollout buffer: a service that collects conversations, and the rollout that trains on them."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.ray.arguments import parse_only
from slime.rollout.arguments import RolloutBufferArgs
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.errors import ConfigError, EngineError
from slime.utils.net import free_port
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, discover_generators, make_app
from slime_plugins.rollout_buffer.generator import base_generator
from slime_plugins.rollout_buffer.generator_turns import GeneratorTurns
from tests.unit.rollout.fake_engine import FakeEngine, make_args
from tests.unit.scripts.bash_arrays import ROOT
from tests.unit.scripts.dry_run import dry_run


@pytest.fixture
def service() -> Iterator[str]:
    """The real service over HTTP, with the generator that asks the engine and with one that breaks."""
    broken = SimpleNamespace(TASK_TYPE="broken", run_rollout=lambda data: 1 / 0)
    app = make_app({"math": base_generator, "broken": broken})  # type: ignore[dict-item]
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(120)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Answers every conversation with the label of its prompt, every other time a wrong one."""

    def answer(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        right = payload["messages"][-1]["content"].rpartition(" ")[2]
        text = f"\\boxed{{{right if number % 2 else '0'}}}"
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    engine = FakeEngine(answer)
    yield engine
    engine.close()


def args_for(tiny_task: Any, tmp_path: Path, engine: FakeEngine, url: str | None, **more: Any) -> Any:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i + 1}", "label": str(i + 1)}) + "\n" for i in range(6)))
    args = make_args(tiny_task.model, engine.port, prompt_data=str(rows), input_key="prompt", num_epoch=None)
    vars(args).update(vars(RolloutBufferArgs()) | {"rollout_buffer_url": url, "loss_mask_type": "qwen"} | more)
    return args


def test_batches_are_complete_groups_each_conversation_once_and_the_rest_waits(
    tiny_task: Any, tmp_path: Path, engine: FakeEngine, service: str
) -> None:
    args = args_for(tiny_task, tmp_path, engine, service, rollout_batch_size=2, n_samples_per_prompt=2)
    source = RolloutDataSourceWithBuffer(args)
    batches = [rollout_buffer_example.generate_rollout(args, i, source) for i in range(3)]
    groups = [group for batch in batches for group in batch]
    assert [len(group) for group in groups] == [2] * 6
    names = [{sample.metadata["instance_id"] for sample in group} for group in groups]
    assert sorted(name for one in names for name in one) == [f"0-{i}" for i in range(6)]
    assert len({sample.index for group in groups for sample in group}) == 12
    for sample in (sample for group in groups for sample in group):
        assert sample.reward == float(sample.response == f"\\boxed{{{sample.label}}}")
        assert sum(sample.loss_mask) >= len(sample.response) - 2
    data = compile_train_data(batches[0], rewards=RewardArgs(n_samples_per_prompt=2))
    assert len(data["tokens"]) == 4
    assert len(source.get_metadata()["finished_instance_ids"]) == 6
    assert len(engine.requests) == 12


def test_what_goes_wrong_names_its_flag(tiny_task: Any, tmp_path: Path, engine: FakeEngine, service: str) -> None:
    def generate(url: str | None, **more: Any) -> None:
        args = args_for(tiny_task, tmp_path, engine, url, **more)
        rollout_buffer_example.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))

    with pytest.raises(ConfigError, match="--rollout-buffer-url"):
        generate(None)
    with pytest.raises(ConfigError, match=r"--rollout-task-type chess: .*unknown; known are \['broken', 'math'\]"):
        generate(service, rollout_task_type="chess")
    with pytest.raises(EngineError, match="the generator ended with ZeroDivisionError"):
        generate(service, rollout_task_type="broken")


def test_a_group_is_handed_out_once_and_only_when_it_is_complete() -> None:
    buffer = RolloutBuffer()
    buffer.configure(base_generator, "math", min_size=2)
    for uid, instance in enumerate("aab"):
        buffer.write({"uid": uid, "instance_id": instance, "messages": [], "reward": uid})
    items, meta, error = buffer.take(wait_s=0.0)
    assert [item["uid"] for item in items] == [0, 1]
    assert (meta["num_groups"], meta["num_waiting_groups"], meta["avg_reward"], error) == (1, 1, 0.5, "")
    assert buffer.take(wait_s=0.0)[0] == []


def test_a_trajectory_that_is_sent_again_because_its_reply_was_lost_counts_once() -> None:
    buffer = RolloutBuffer()
    buffer.configure(base_generator, "math", min_size=2)
    for uid in ("x", "x", "y", "y"):
        buffer.write({"uid": uid, "instance_id": "a", "messages": [], "reward": 1.0})
    items, _, _ = buffer.take(wait_s=0.0)
    assert [item["uid"] for item in items] == ["x", "y"]
    buffer.write({"uid": "y", "instance_id": "a", "messages": [], "reward": 1.0})  # after its group was taken
    assert buffer.take(wait_s=0.0)[1]["num_waiting_groups"] == 0


def test_a_request_to_start_that_is_sent_again_starts_no_second_generator() -> None:
    starts: queue.Queue[str] = queue.Queue()
    own = SimpleNamespace(TASK_TYPE="own", run_rollout=lambda data: starts.put(data["start_id"]))
    service = make_app({"own": own})  # type: ignore[dict-item]
    start = next(route.endpoint for route in service.routes if route.path == "/start_rollout")  # type: ignore[attr-defined]
    replies = [start({"task_type": "own", "start_id": name}) for name in ("a", "a", "b")]
    assert all(reply["success"] for reply in replies)
    assert {starts.get(), starts.get()} == {"a", "b"}
    assert starts.empty()


def test_a_reply_that_was_lost_is_sent_again_and_what_follows_lets_it_go() -> None:
    buffer = RolloutBuffer()
    write_group(buffer, "a")
    first = buffer.take(wait_s=0.0, client="me", received=0)
    write_group(buffer, "b")
    again = buffer.take(wait_s=0.0, client="me", received=0)
    assert [item["instance_id"] for item in first[0]] == [item["instance_id"] for item in again[0]] == ["a"]
    assert [item["instance_id"] for item in buffer.take(wait_s=0.0, client="me", received=1)[0]] == ["b"]
    assert buffer.take(wait_s=0.0, client="me", received=2)[0] == []


def test_two_attempts_of_one_request_that_wait_side_by_side_get_the_same_groups() -> None:
    buffer, replies = RolloutBuffer(), queue.Queue[list[Any]]()
    attempts = [
        threading.Thread(target=lambda: replies.put(buffer.take(wait_s=20.0, client="me", received=0)[0]), daemon=True)
        for _ in range(2)
    ]
    for attempt in attempts:
        attempt.start()
    write_group(buffer, "a")
    assert [[item["instance_id"] for item in replies.get()] for _ in attempts] == [["a"], ["a"]]


def test_the_next_trainer_gets_what_the_one_before_it_may_not_have_got() -> None:
    buffer, waited = RolloutBuffer(), queue.Queue[list[Any]]()
    for name in ("finished", "sent"):
        write_group(buffer, name)
    buffer.take(wait_s=0.0, client="before", received=0)
    buffer.begin_run(finished=["finished"])
    assert buffer.made() == ["finished", "sent"]
    assert [item["instance_id"] for item in buffer.take(wait_s=0.0, client="after", received=0)[0]] == ["sent"]
    # a request of a trainer that has ended: it must not take the groups for the new one
    waiting = threading.Thread(target=lambda: waited.put(buffer.take(wait_s=60.0, client="gone", received=1)[0]))
    waiting.start()
    while not buffer._change._waiters:  # type: ignore[attr-defined]
        assert waiting.is_alive()
    buffer.begin_run(finished=[])
    assert waited.get() == []
    write_group(buffer, "next")
    assert {item["instance_id"] for item in buffer.take(wait_s=0.0, client="new", received=0)[0]} == {"next", "sent"}


def write_group(buffer: RolloutBuffer, instance_id: str) -> None:
    buffer.write({"uid": f"of {instance_id}", "instance_id": instance_id, "messages": [], "reward": 1.0})


class SlowGenerators:
    """``run_rollout`` that ends on the test's signal."""

    def __init__(self) -> None:
        self.payloads: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ends: queue.Queue[Exception | None] = queue.Queue()

    def run_rollout(self, data: dict[str, Any]) -> None:
        self.payloads.put(data)
        error = self.ends.get()
        if error is not None:
            raise error


def test_a_trainer_that_is_started_again_starts_its_generator_when_the_one_before_has_ended() -> None:
    slow, buffer = SlowGenerators(), RolloutBuffer()
    turns = GeneratorTurns({"own": slow}, buffer)  # type: ignore[dict-item]
    task = {"task_type": "own", "input_file": "rows.jsonl", "num_repeat_per_sample": "2"}
    assert turns.start(task | {"start_id": "first"})[0]
    assert slow.payloads.get()["start_id"] == "first"
    for name in ("lost", "lost", "finished", "finished", "half"):
        buffer.write({"instance_id": name, "messages": [], "reward": 1.0})
    buffer.take(wait_s=0.0, client="first", received=0)
    buffer.take(wait_s=0.0, client="first", received=1)  # it has got them, and dies before it has trained on "lost"
    success, message = turns.start(task | {"start_id": "second", "skip_instance_ids": ["finished"]})
    assert (success, "is running" in message) == (True, True)
    for name in ("whole", "whole"):
        buffer.write({"instance_id": name, "messages": [], "reward": 1.0})
    slow.ends.put(ConnectionError("the engines of the run before are gone"))
    second = slow.payloads.get()
    assert (second["start_id"], second["skip_instance_ids"]) == ("second", ["finished", "whole"])
    items, meta, end = buffer.take(wait_s=0.0, client="second", received=0)
    assert ({item["instance_id"] for item in items}, meta["num_waiting_groups"], end) == ({"whole"}, 0, "")
    assert slow.payloads.empty()
    slow.ends.put(None)
    assert "made all" in buffer.take(wait_s=20.0, client="second", received=1)[2]


def test_runs_of_different_tasks_do_not_share_a_service_at_the_same_time() -> None:
    slow, buffer = SlowGenerators(), RolloutBuffer()
    turns = GeneratorTurns({"own": slow}, buffer)  # type: ignore[dict-item]
    assert turns.start({"task_type": "own", "input_file": "a.jsonl", "start_id": "a"})[0]
    write_group(buffer, "of a.jsonl")
    other = {"task_type": "own", "input_file": "b.jsonl", "start_id": "b"}
    success, message = turns.start(other)
    assert not success
    assert "a generator with input_file 'a.jsonl' is still running, this one has 'b.jsonl'" in message
    assert slow.payloads.get()["start_id"] == "a"
    slow.ends.put(None)
    while not turns.start(other)[0]:  # until the generator's thread has ended
        assert slow.payloads.empty()
    assert buffer.take(wait_s=0.0)[0] == []
    slow.ends.put(None)


def test_rewards_that_are_no_numbers_are_handed_out_all_the_same() -> None:
    buffer = RolloutBuffer()
    buffer.write({"instance_id": "a", "messages": [], "reward": {"score": 1.0}})
    items, meta, _ = buffer.take(wait_s=0.0)
    assert items[0]["reward"] == {"score": 1.0}
    assert (meta["total_samples"], meta["avg_group_size"]) == (1, 1.0)
    assert "avg_reward" not in meta


def test_a_generator_s_own_functions_end_with_it() -> None:
    own = SimpleNamespace(
        transform_group=lambda group, task_type: group[:1],
        is_valid_group=lambda group, min_size, task_type: bool(group),
        get_group_data_meta_info=lambda groups: {"mine": len(groups)},
    )
    buffer = RolloutBuffer()
    items = [{"uid": uid, "instance_id": "a", "messages": [], "reward": 1.0} for uid in range(2)]
    buffer.configure(own, "own", min_size=2)  # type: ignore[arg-type]
    for item in items:
        buffer.write(item)
    taken, meta, _ = buffer.take(wait_s=0.0)
    assert ([item["uid"] for item in taken], meta["mine"]) == ([0], 1)
    buffer.configure(base_generator, "math", min_size=2)
    for item in items:
        buffer.write(item)
    taken, meta, _ = buffer.take(wait_s=0.0)
    assert [item["uid"] for item in taken] == [0, 1]
    assert "mine" not in meta


def test_a_group_that_a_generator_s_function_breaks_on_is_not_lost() -> None:
    buffer = RolloutBuffer()
    buffer.configure(SimpleNamespace(transform_group=lambda group, task_type: 1 / 0), "own", 1)  # type: ignore[arg-type]
    buffer.write({"instance_id": "a", "messages": [], "reward": 1.0})
    with pytest.raises(ZeroDivisionError):
        buffer.take(wait_s=0.0)
    buffer.configure(base_generator, "math", min_size=1)
    assert len(buffer.take(wait_s=0.0)[0]) == 1


def test_groups_that_did_not_reach_the_data_buffer_are_sent_again(
    tiny_task: Any, tmp_path: Path, engine: FakeEngine, service: str
) -> None:
    args = args_for(tiny_task, tmp_path, engine, service, rollout_batch_size=6, n_samples_per_prompt=1)
    source = RolloutDataSourceWithBuffer(args)
    keep = source.add_samples

    def breaks_once(groups: Any) -> None:
        source.add_samples = keep  # type: ignore[method-assign]
        raise ConnectionError("the Data Buffer is being started again")

    source.add_samples = breaks_once  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        rollout_buffer_example.generate_rollout(args, 0, source)
    groups = rollout_buffer_example.generate_rollout(args, 0, source)
    assert sorted(sample.label for group in groups for sample in group) == ["1", "2", "3", "4", "5", "6"]


def test_an_instance_that_the_engines_refuse_is_left_out_and_the_others_are_answered(
    tiny_task: Any, tmp_path: Path, engine: FakeEngine, service: str
) -> None:
    answer = engine.on_generate

    def refuse_the_third(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        is_third = payload["messages"][-1]["content"] == "say 3"
        return (400, {"error": "too long"}) if is_third else answer(payload, number)

    engine.on_generate = refuse_the_third
    args = args_for(tiny_task, tmp_path, engine, service, rollout_batch_size=5, n_samples_per_prompt=2)
    groups = rollout_buffer_example.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {sample.label for group in groups for sample in group} == {"1", "2", "4", "5", "6"}


def test_a_finished_generator_leaves_no_trainer_waiting(
    tiny_task: Any, tmp_path: Path, engine: FakeEngine, service: str
) -> None:
    args = args_for(tiny_task, tmp_path, engine, service, rollout_batch_size=4, n_samples_per_prompt=1)
    source = RolloutDataSourceWithBuffer(args)
    assert len(rollout_buffer_example.generate_rollout(args, 0, source)) == 4
    with pytest.raises(EngineError, match=r"made all it was asked for\. \d of \d groups are there; --num-epoch"):
        rollout_buffer_example.generate_rollout(args, 1, source)


def test_a_turn_that_an_engine_gives_up_goes_on_where_it_stopped() -> None:
    parts = [("", "abort"), ("\\boxed{4", "abort"), ("2}", "stop")]

    def answer(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        text, reason = parts[number]
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(text)}}

    engine, question = FakeEngine(answer), {"role": "user", "content": "6 * 7 ="}
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none")
        messages = base_generator.query_single_turn(client, [question], {"max_tokens": 20, "top_k": 5})
        assert messages == [question, {"role": "assistant", "content": "\\boxed{42}", "finish_reason": "stop"}]
    finally:
        engine.close()
    first, second, third = engine.requests
    assert first == second == {"model": "default", "messages": [question], "max_tokens": 20, "top_k": 5}
    assert third["messages"] == [question, {"role": "assistant", "content": "\\boxed{4"}]
    assert (third["continue_final_message"], third["max_tokens"]) == (True, 12)


def test_a_generator_holds_the_conversations_of_a_users_functions(tmp_path: Path, engine: FakeEngine) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say 3", "label": "3", "bonus": 2}\n')

    def two_turns(client: OpenAI, messages: list[Any], sampling_params: dict[str, Any]) -> list[Any]:
        for _ in range(2):
            reply = client.chat.completions.create(model="default", messages=messages, **sampling_params)
            answer = {"role": "assistant", "content": reply.choices[0].message.content}
            messages = [*messages, answer, {"role": "user", "content": "say 3"}]
        return messages[:-1]

    sent: list[dict[str, Any]] = []

    class Kept(base_generator.BaseGenerator):
        def send_data_to_buffer(self, data: dict[str, Any]) -> None:
            sent.append(data)

    generator = Kept(f"http://127.0.0.1:{engine.port}", "http://unused", 2, num_repeats=2, num_process=1)
    generator.run(str(rows), two_turns, lambda item: item["bonus"] * len(item["messages"]))
    assert [item["instance_id"] for item in sent] == ["0-0", "0-0", "1-0", "1-0"]
    assert [item["reward"] for item in sent] == [8] * 4
    assert sent[0]["messages"][-1] == {"role": "assistant", "content": "\\boxed{3}"}
    assert (sent[0]["extra_info"]["round_number"], sent[0]["extra_info"]["finish_reason"]) == (2, "stop")
    generator.entry(str(rows), two_turns, lambda item: 0.0)
    assert sent[-1]["instance_id"] == "3-0"


def test_an_exception_of_a_users_function_ends_the_generator(tmp_path: Path, engine: FakeEngine) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say 3"}\n' * 50)
    generator = base_generator.BaseGenerator("http://unused", "http://unused", num_process=1)
    calls: list[Any] = []

    def broken(client: OpenAI, messages: list[Any], sampling_params: dict[str, Any]) -> list[Any]:
        calls.append(messages)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generator.run(str(rows), broken, lambda item: 0.0)
    assert len(calls) == 1


def test_the_launch_script_passes_flags_that_fit_each_other(tmp_path: Path) -> None:
    script = ROOT / "slime_plugins" / "rollout_buffer" / "rollout_buffer_example.sh"
    command = dry_run(script, env={"BASE_DIR": str(tmp_path)})
    assert command.entry.endswith("/train_async.py")
    _, problems = parse_only(command.argv, is_async=True)
    missing = [problem for problem in problems if str(tmp_path) in problem]
    assert problems == missing, "only models and data are missing"


def test_the_generator_of_the_readme_runs(tmp_path: Path, engine: FakeEngine, service: str) -> None:
    text = (ROOT / "slime_plugins" / "rollout_buffer" / "README.md").read_text()
    module: dict[str, Any] = {}
    exec(text.split("```python")[1].split("```")[0], module)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say 3"}\n')
    counts = dict.fromkeys(("num_repeat_per_sample", "num_process", "max_tokens", "num_epoch"), "1")
    urls = {"remote_engine_url": f"http://127.0.0.1:{engine.port}", "remote_buffer_url": service}
    module["run_rollout"](counts | urls | {"input_file": str(rows), "sampling_params": {}, "skip_instance_ids": []})
    reply = httpx.post(f"{service}/get_rollout_data", json={"wait_s": 20}).json()
    assert [item["reward"] for item in reply["data"]["data"]] == [0.0]


def test_generators_are_found_by_their_task_type() -> None:
    assert discover_generators() == {"math": base_generator}
