"""Two nodes that reach one another over a network only: raylets with separate networks and shared memory.

Needs to be root. Everything lives in a process namespace as well, and ends with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.running import PLUGINS, ROOT, metrics, values

NAMESPACES = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")

TWO_NODES = """
set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
unshare --net --mount sh -c 'mount -t tmpfs shm /dev/shm && touch /dev/shm/ready && exec sleep infinity' &
PEER=$!
other() { nsenter --target $PEER --net --mount "$@"; }
until other test -e /dev/shm/ready; do sleep 0.02; done
ip link set eth1 netns $PEER
ip address add 10.77.0.1/24 dev eth0
ip link set eth0 up
other ip link set lo up
other ip link set eth1 name eth0
other ip address add 10.77.0.2/24 dev eth0
other ip link set eth0 up
"""

RUN = """
export GLOO_SOCKET_IFNAME=eth0 RAY_AUTH_MODE=disabled
NODE="--num-cpus 4 --object-store-memory 200000000 --disable-usage-stats"
HEAD="--head --port 6379 --include-dashboard false --temp-dir $RAY_DIRECTORY"
ray start $HEAD --node-ip-address 10.77.0.1 --num-gpus 2 $NODE
other ray start --address 10.77.0.1:6379 --node-ip-address 10.77.0.2 --num-gpus 1 $NODE
export RAY_ADDRESS=10.77.0.1:6379
python "$@"
"""


def is_allowed() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACES, "bash", "-c", TWO_NODES], capture_output=True).returncode == 0


def test_an_engine_with_a_part_in_each_of_two_networks_is_trained(tiny_task, tmp_path):
    if not is_allowed():
        pytest.skip("network namespaces need root")
    flags = [
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"),
        *("--apply-chat-template", "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--num-rollout", 2),
        *("--rollout-max-response-len", 8, "--custom-rm-path", f"{PLUGINS}:share_of_sevens", "--fp32"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--sglang-context-length", 128),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2),
        *("--num-gpus-per-node", 1),
        *("--sglang-max-total-tokens", 8192, "--output-dir", tmp_path, "--experiment-name", "run", "--lr", "1e-3"),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_directory:  # short enough for the sockets in it
        command = [*NAMESPACES, "bash", "-c", TWO_NODES + RUN, "run", ROOT / "train.py", *flags]
        done = subprocess.run(
            list(map(str, command)),
            env=env | {"RAY_DIRECTORY": ray_directory},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    log = (tmp_path / "run" / "run.log").read_text()
    (engine,) = set(re.findall(r"engines http://([\d.]+):\d+", log))
    slots = re.findall(r"slot \d: device \d of node ([\d.]+)", log)
    assert slots[1:] == [engine, "10.77.0.2"] == ["10.77.0.1", "10.77.0.2"], "the trainer has the first slot"
    assert (tmp_path / "run" / "engines" / "engine_0.node1.log").is_file()
    differences = values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-4, "the second rollout is made by weights that were sent over the network"
