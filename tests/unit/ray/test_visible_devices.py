"""Ray's processes must see every device of their node: slime assigns the devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.accelerators import amd_gpu, nvidia_gpu

from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "variable",
    [nvidia_gpu.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR, amd_gpu.NOSET_HIP_VISIBLE_DEVICES_ENV_VAR],
)
def test_the_variable_that_this_ray_reads_for_a_vendor_is_set(variable: str) -> None:
    assert NOSET_VISIBLE_DEVICES[variable] == "1"


_COUNT = """
import os
import sys
import ray
from argparse import Namespace
from slime.ray.run.cluster import running_cluster, worker_env
args = Namespace(debug_train_only=True, debug_rollout_only=False, world_size=2, rollout_external=False, colocate=False)
vars(args).update(engines_port=None, train_backend="megatron", output_dir=sys.argv[1], experiment_name="run")
with running_cluster(args):
    seen = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).options(runtime_env={"env_vars": worker_env()})
    niceness = ray.remote(lambda: os.nice(0)).remote()
    print("actors are less nice than their driver by", os.nice(0) - ray.get(niceness))
    print("slots", ray.cluster_resources()["GPU"], "seen", repr(ray.get(seen.remote())))
"""


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_leave_the_logical_slots_of_a_cpu_alone_and_stay_hidden(hidden: str, tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": hidden, "SLIME_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, str(tmp_path)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert f"slots 2.0 seen {hidden!r}" in done.stdout, done.stderr[-3000:]
    assert "actors are less nice than their driver by 0" in done.stdout, "Ray's own niceness starves them"
