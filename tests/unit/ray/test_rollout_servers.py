"""Several models: who receives weights, who shares devices, who is asked. Engines and routers are fakes."""

from __future__ import annotations

import asyncio
import base64
import threading
from argparse import Namespace
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.backends.sglang_utils.server_process import ForkAddress
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.config.arguments import FaultToleranceArgs
from slime.ray.engines import http_workers
from slime.ray.engines import servers as engine_servers
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.http_workers import HttpWorker, are_wanted
from slime.ray.engines.servers import RolloutServers, watch_settings
from slime.ray.placement_group import GpuSlots
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator
from slime.utils.errors import ConfigError, DeadlineExceeded, EngineError
from slime.utils.http_utils import Reply
from tests.unit.ray.runs import fleet


class Slots:
    """EngineSlots of one model."""

    def __init__(self, living: RayEngineFleet, waiting: WaitingEngines) -> None:
        self.living, self.is_waiting = living, waiting
        self.diary: list[str] = []

    def fleet(self) -> RayEngineFleet:
        return self.living

    def waiting(self) -> WaitingEngines:
        return self.is_waiting

    def __getattr__(self, name: str):
        return lambda *arguments: self.diary.append(name)


def servers(*models: tuple[bool, RayEngineFleet, WaitingEngines], **changes) -> RolloutServers:
    made = object.__new__(RolloutServers)
    values = {"world_size": 2, "colocate": True, "debug_rollout_only": False, "debug_train_only": False}
    values |= {"rollout_num_gpus": 4, "rollout_external": False, "offload_rollout": True}
    values |= {"use_rollout_routing_replay": False}
    made._args = Namespace(**values | changes)
    made._places, made._external, made._joined, made._reserving = {}, {}, {}, set()
    made._changing = threading.RLock()
    made._models = [
        SimpleNamespace(
            name=str(number),
            updates_weights=updates,
            engines=Slots(living, waiting),
            router=SimpleNamespace(is_ours=True, raise_if_dead=lambda: None),
        )
        for number, (updates, living, waiting) in enumerate(models)
    ]
    return made


NOBODY = WaitingEngines(fleet(), 1)


def test_weights_go_to_every_model_that_takes_them_and_to_no_other():
    models = (True, fleet("0.0", "1.0"), NOBODY), (False, fleet("2.0"), NOBODY), (True, fleet("3.0"), NOBODY)
    several = servers(*models, offload_rollout=False)
    assert several.fleet.names == ("0.0", "1.0", "3.0")
    assert several.all_engines().names == ("0.0", "1.0", "2.0", "3.0")
    assert several.begin_sync().names == ("0.0", "1.0", "3.0")
    several.end_sync(["0.0"])
    assert [server.engines.diary for server in several._models] == [
        ["pause_watch", "admit", "resume_watch"],
        ["pause_watch", "resume_watch"],
        ["pause_watch", "admit", "resume_watch"],
    ]


def test_engines_that_share_devices_are_watched_again_once_they_have_their_memory():
    sharing = servers((True, fleet("0.0"), NOBODY))
    sharing.begin_sync()
    sharing.end_sync(["0.0"])
    assert sharing._models[0].engines.diary == ["pause_watch", "admit"]


def test_engines_on_the_trainers_devices_release_their_memory_frozen_ones_too():
    several = servers((True, fleet("0.0", "1.0", slots=(0, 2)), NOBODY), (False, fleet("2.0", slots=(1,)), NOBODY))
    assert list(several.offloadable().names) == ["0.0", "2.0"]


def test_of_the_models_that_wait_for_weights_the_one_that_serves_least_decides():
    alone, helped = WaitingEngines(fleet("0.1"), 0), WaitingEngines(fleet("3.1"), 2)
    several = servers((True, fleet(), alone), (True, fleet("2.0"), NOBODY), (True, fleet("3.1"), helped))
    assert several.waiting().fleet.names == ("0.1", "3.1")
    assert several.waiting().num_serving == 0


def test_a_model_that_keeps_its_weights_is_never_among_those_that_wait_for_them():
    several = servers((True, fleet("0.0"), NOBODY), (False, fleet(), WaitingEngines(fleet("2.1"), 0)))
    assert several.waiting().fleet.names == ()
    assert several.waiting().num_serving == 1


def test_a_model_that_keeps_its_weights_ends_the_run_when_it_cannot_be_kept_alive():
    several = servers((True, fleet("0.0"), NOBODY), (False, fleet(), NOBODY))

    def fail() -> None:
        raise EngineError("engine 2 died 4 times")

    several._models[1].engines.waiting = fail
    with pytest.raises(EngineError, match="engine 2 died 4 times"):
        several.waiting()


def test_the_dead_are_those_that_no_model_knows_any_more():
    several = servers((True, fleet("0.0"), NOBODY), (False, fleet("2.0"), NOBODY))
    assert several.lost(["0.0", "1.0", "2.0"]) == ["1.0"]
    assert [server.engines.diary for server in several._models] == [["look"], ["look"]]


def test_a_dead_router_is_the_answer_to_who_needs_weights():
    several = servers((True, fleet("0.0"), NOBODY))

    def fail() -> None:
        raise EngineError("the router ended")

    several._models[0].router.raise_if_dead = fail
    with pytest.raises(EngineError, match="the router ended"):
        several.waiting()


@pytest.mark.parametrize(
    ("slot", "updates", "fields"),
    [
        (0, True, {}),
        (1, False, {"enable_weights_cpu_backup": True}),
        (2, True, {"enable_memory_saver": False}),
        (3, False, {"enable_memory_saver": False}),
    ],
)
def test_what_an_engine_keeps_in_memory_follows_from_its_devices_and_the_file_decides(slot, updates, fields):
    several = servers()
    place = EnginePlace(0, WorkerType.REGULAR, slot, 1, {"context_length": 9})
    assert several._for_model(place, updates).overrides == {"context_length": 9, **fields}
    own = EnginePlace(0, WorkerType.REGULAR, slot, 1, dict.fromkeys(fields, "the user's"))
    assert several._for_model(own, updates).overrides == dict.fromkeys(fields, "the user's")
    several._args.offload_rollout = False
    assert several._for_model(place, updates) == place


def test_a_model_that_keeps_its_weights_is_not_asked_for_expert_choices_it_may_have_no_experts():
    several = servers(use_rollout_routing_replay=True, offload_rollout=False)
    place = EnginePlace(0, WorkerType.REGULAR, 0, 1, {"context_length": 9})
    assert several._for_model(place, updates_weights=True) == place
    fields = several._for_model(place, updates_weights=False).overrides
    assert fields == {"context_length": 9, "enable_return_routed_experts": False}


def test_engines_are_forked_from_a_process_of_their_own_node_only(tmp_path):
    address = ForkAddress("10.0.0.1", str(tmp_path / "socket"))
    assert address.socket_on("10.0.0.1") == str(tmp_path / "socket")
    assert address.socket_on("10.0.0.2") is None, "another node, on the same file system"
    assert ForkAddress("10.0.0.1", str(tmp_path / "gone" / "socket")).socket_on("10.0.0.1") is None


def test_an_engine_over_several_nodes_is_refused_where_rays_nodes_are_smaller_than_the_flag_says():
    several = servers(num_gpus_per_node=4)
    wide = EnginePlace(0, WorkerType.REGULAR, 0, 8, {})
    several._gpus = GpuSlots(None, range(8), [0, 1, 2, 3, 0, 1, 2, 3])
    several._check_nodes(wide, several._gpus)
    several._gpus = GpuSlots(None, range(8), [0, 1, 2, 0, 1, 2, 0, 1])
    with pytest.raises(ConfigError, match=r"--num-gpus-per-node 4: engine 0 got the devices \[0, 1, 2, 0\]"):
        several._check_nodes(wide, several._gpus)


def test_an_engine_whose_devices_have_a_gap_is_refused_for_its_server_would_take_those_of_others(monkeypatch):
    monkeypatch.setattr(engine_servers.accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    several = servers(num_gpus_per_node=8)
    engine = EnginePlace(0, WorkerType.REGULAR, 0, 3, {})
    several._gpus = GpuSlots(None, range(3), [0, 2, 3], [0, 2, 3])
    with pytest.raises(ConfigError, match=r"--rollout-num-gpus-per-engine 3: engine 0 got the devices \[0, 2, 3\]"):
        several._check_nodes(engine, several._gpus)
    several._check_nodes(EnginePlace(0, WorkerType.REGULAR, 1, 2, {}), several._gpus)  # 2 and 3
    several._gpus = GpuSlots(None, range(3), [0, 2, 3], [0, 1, 2])  # CUDA_VISIBLE_DEVICES=0,2,3
    several._check_nodes(engine, several._gpus)


# --- engines that others register (--rollout-num-gpus 0)


class Registered:
    """A router that lists ``urls``, and their engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *urls: str, dtype: str = "float32") -> None:
        self.urls = list(urls)
        self.started: list[list[int]] = []
        info = {"dtype": dtype}
        monkeypatch.setattr(engine_servers, "registered_workers", lambda router: self.urls)
        monkeypatch.setattr(
            engine_servers,
            "discover_external_engines",
            lambda urls, source: [ExternalEngineInfo(url, "h", 1, "regular", 1, None, info) for url in urls],
        )
        self.servers = servers((True, fleet(), NOBODY), rollout_num_gpus=0, engine_start_timeout=0.0)
        self.servers._args.__dict__.update(bf16=False, fp16=False, fp32=True)
        server = self.servers._models[0]
        server.router = SimpleNamespace(
            is_ours=True, url="http://router:1", wait_ready=lambda: None, raise_if_dead=lambda: None
        )
        server.engines.start = lambda ranks: self.started.append(list(ranks))
        server.engines.states = lambda: dict.fromkeys(rank for ranks in self.started for rank in ranks)


def test_a_run_without_engines_waits_for_one_and_says_how_to_register_it(monkeypatch: pytest.MonkeyPatch, caplog):
    with pytest.raises(DeadlineExceeded, match=r"an engine to register with the router at http://router:1, because"):
        Registered(monkeypatch).servers.await_engines()
    assert "curl http://router:1/workers" in caplog.text


def test_engines_are_taken_over_when_they_register_also_later(monkeypatch: pytest.MonkeyPatch):
    world = Registered(monkeypatch, "http://a:1")
    world.servers.await_engines()
    world.urls.append("http://b:1")
    world.servers.begin_sync()
    world.servers.begin_sync()
    assert world.started == [[0], [1]]
    assert world.servers._args.rollout_num_engines == 2


def test_an_engine_that_has_left_and_registers_again_is_taken_over_again(monkeypatch: pytest.MonkeyPatch):
    world = Registered(monkeypatch, "http://a:1", "http://b:1")
    world.servers.await_engines()
    world.servers._on_gone(0)
    world.servers.begin_sync()
    assert world.started == [[0, 1], [2]]
    assert world.servers._external[2].url == "http://a:1"


def test_a_registered_engine_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"the registered engine http://a:1: its weights are bfloat16"):
        Registered(monkeypatch, "http://a:1", dtype="bfloat16").servers.await_engines()


@pytest.mark.parametrize(
    ("given", "device", "waits"),
    [
        (None, CPUAccelerator, (0.0, 0.0)),
        (None, CUDAAccelerator, (300.0, 0.0)),
        (7.0, CUDAAccelerator, (7.0, 7.0)),
        (0.0, CUDAAccelerator, (0.0, 0.0)),
    ],
)
def test_on_gpus_the_first_health_check_leaves_time_to_compile_kernels(given, device, waits, monkeypatch):
    monkeypatch.setattr(accelerator, "current", device)
    settings = watch_settings(FaultToleranceArgs(rollout_health_check_first_wait=given), 1.0)
    assert (settings.first_wait_s, settings.later_wait_s) == waits


@pytest.mark.parametrize(
    ("is_cpu", "posts", "replays", "found"),
    [
        (True, False, True, False),
        (True, True, False, True),
        (False, False, False, False),
        (False, False, True, True),
    ],
)
def test_replies_with_routed_experts_are_received_by_workers_on_gpus(
    is_cpu: bool, posts: bool, replays: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.utils.accelerator.current", lambda: SimpleNamespace(is_cpu=is_cpu))
    assert are_wanted(is_asked_for=posts, replays_experts=replays) is found


@pytest.mark.parametrize("num_choices", [100, 3 << 20])
def test_a_worker_compresses_large_replies_beside_its_event_loop(num_choices, monkeypatch):
    choices = bytes(4 * num_choices)
    content = {"text": "", "meta_info": {"routed_experts": base64.b64encode(choices).decode()}}
    threads = []

    async def answer(*_):
        return Reply(200, content)

    def compressed(data):
        threads.append(threading.current_thread())
        return compress(data)

    compress = http_workers._compressed
    monkeypatch.setattr(http_workers.http_utils, "send", answer)
    monkeypatch.setattr(http_workers, "_compressed", compressed)
    worker = object.__new__(HttpWorker)  # its constructor registers the process with the run
    data = asyncio.run(worker.send("http://engine/generate", {}, None, 1.0))
    assert http_workers._unpacked(data) == Reply(200, content)
    assert [thread is threading.main_thread() for thread in threads] == [num_choices == 100]
