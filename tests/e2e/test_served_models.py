"""Several models, unequal engines and two nodes on the real stack: --sglang-config in a cluster of others.

The nodes are two raylets on this machine with separate devices. The engine with two devices takes each for a
node (``--num-gpus-per-node 1``): it has two servers.
"""

from __future__ import annotations

import re

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.e2e.running import metrics, values
from tests.e2e.test_fault_tolerance import flags_for, samples_of, seconds_to_recovery, versions_of
from tests.e2e.watching import is_generating, read, running, scheduler_of, scheduler_on_second_node, server_of

ROLLOUTS = 3

ENGINES = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 1}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
  - name: ref
    update_weights: false
    server_groups:
      - {worker_type: regular, num_gpus: 1, overrides: {context_length: 64}}
"""


@pytest.fixture
def two_nodes(monkeypatch):
    """Address of a cluster whose two nodes have three devices each."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    node = {"num_cpus": 4, "num_gpus": 3, "object_store_memory": 200 * 1024**2}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_unequal_engines_on_two_nodes_learn_beside_a_model_that_keeps_its_weights_and_outlive_their_deaths(
    two_nodes, tiny_task, tmp_path
):
    engines = tmp_path / "engines.yaml"
    engines.write_text(ENGINES)
    more = ("--rollout-num-gpus", 5, "--num-gpus-per-node", 1, "--sglang-config", engines)
    flags = flags_for(tiny_task, tmp_path, *more, reward="sevens_and_what_the_reference_says", num_rollout=ROLLOUTS)
    hold = tmp_path / "hold"
    hold.write_text("1")  # the second rollout goes on until all engines are back
    with running(flags, tmp_path, RAY_ADDRESS=two_nodes) as run:
        router, first, second = run.urls()
        (ref,) = run.urls_of("ref")
        assert {worker["url"] for worker in read(f"{router}/workers")["workers"]} == {first, second}
        assert read(f"{ref}/server_info")["context_length"] == 64
        assert read(f"{second}/server_info")["tp_size"] == 2
        run.wait(lambda: run.num_trained() >= 1 and is_generating(first) and is_generating(second))
        # all that make the rollout, one of them by a part on its second node: it waits until one serves
        for process in [server_of(ref), scheduler_of(first), scheduler_on_second_node(second)]:
            process.kill()
        run.wait(lambda: len(seconds_to_recovery(run.text())) == 3)
        hold.unlink()
        finished = run.end()

    dumps = samples_of(run, finished, ROLLOUTS)
    assert versions_of(dumps) == [{rollout_id} for rollout_id in range(ROLLOUTS)]
    answers = [sample["metadata"]["ref"] for dump in dumps for sample in dump]
    assert {answer["version"] for answer in answers} == {"default"}
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert len(seconds_to_recovery(finished.output)) == 3, finished.output[-6000:]

    hosts = re.findall(r"http://([\d.]+):\d+", " ".join((router, first, second, ref)))
    assert set(hosts) == {two_nodes.rpartition(":")[0]}, "services are reached by the address of their node"
    slots = re.findall(r"slot (\d): device (\d) of node \S+ \((\w+)\)", finished.output)
    assert [(slot, device) for slot, device, _ in slots] == [(str(i), str(i % 3)) for i in range(6)]
    nodes = [node for _, _, node in slots]
    assert len(set(nodes[:3])) == len(set(nodes[3:])) == 1
    assert nodes[0] != nodes[3]
    check_the_cluster_is_as_it_was(two_nodes)


def check_the_cluster_is_as_it_was(address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    assert ray.cluster_resources()["GPU"] == 6
    assert sum(node["Alive"] for node in ray.nodes()) == 2
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    ray.shutdown()
