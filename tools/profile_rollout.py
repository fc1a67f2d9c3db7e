"""Start or stop the profiler of every engine of a router.

    python tools/profile_rollout.py --router-url http://127.0.0.1:30000 --num-steps 3 --output-dir /tmp/profile
    python tools/analyze_profile.py --profile-dir /tmp/profile

``--rollout-function-path slime.rollout.forge_load.sleep`` keeps the engines of a run up and idle meanwhile, for
your requests. The engines write the traces, on their machines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import httpx

_TIMEOUT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router-url", required=True)
    parser.add_argument("--action", choices=["start", "stop"], default="start")
    parser.add_argument("--output-dir", help="default: a new temporary folder")
    parser.add_argument("--num-steps", type=int, default=3, help="forward steps, default %(default)s")
    parser.add_argument("--activities", nargs="+", choices=["CPU", "GPU", "MEM", "CUDA_PROFILER"], default=["GPU"])
    parser.add_argument("--profile-by-stage", action="store_true", help="prefill and decode apart")
    parser.add_argument("--with-stack", action="store_true")
    parser.add_argument("--record-shapes", action="store_true")
    options = parser.parse_args()
    try:
        return run(options)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:  # or no answer of a router
        print(f"--router-url {options.router_url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Send the action to every engine. Returns the exit status."""
    # Without trust_env=False a proxy of the environment would get requests for addresses of the cluster.
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        workers = worker_urls(client, options.router_url.rstrip("/"))
        if not workers:
            print(f"{options.router_url} lists no engine", file=sys.stderr)
            return 1
        body = start_request(options) if options.action == "start" else {}
        for url in workers:
            client.post(f"{url}/{options.action}_profile", json=body).raise_for_status()
            print(f"{options.action}: {url}")
    if options.action == "start":
        print(f"traces: {body['output_dir']}")
    return 0


def worker_urls(client: httpx.Client, router: str) -> list[str]:
    """The engines that a router sends requests to."""
    reply = client.get(f"{router}/workers").raise_for_status().json()
    return [worker["url"] for worker in reply["workers"]]


def start_request(options: argparse.Namespace) -> dict[str, Any]:
    """The body of ``/start_profile``."""
    return {
        # The engines write to this path on their machines. mkdtemp makes the folder on this machine only.
        "output_dir": options.output_dir or tempfile.mkdtemp(prefix="profile_"),
        "num_steps": options.num_steps,
        "activities": options.activities,
        "profile_by_stage": options.profile_by_stage,
        "with_stack": options.with_stack,
        "record_shapes": options.record_shapes,
    }


if __name__ == "__main__":
    sys.exit(main())
