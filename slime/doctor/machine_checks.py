"""The machine: Python, packages, driver, kernels, device, memory, network, limits of the operating system, ports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slime.config.plan.placement import PlanError, plan_placement, read_layout
from slime.config.plan.render import size
from slime.config.plan.shape import read_shape
from slime.doctor import Finding, Situation, fail, ok, warn
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from slime.utils.net import FIRST_SERVICE_PORT, is_port_free
from slime.utils.process import num_cpus

_OLDEST, _TOO_NEW = (3, 11), (3, 14)
_MIN_OPEN_FILES = 4096
_GOOD_OPEN_FILES = 65536
_SHM = Path("/dev/shm")
_CPU_OBJECT_STORE = 512 * 1024**2
_RAY_SHARE = 0.3  # of the memory, Ray's own default where slime does not set it
_PORTS_PER_ENGINE = 10
_MOST_PER_CPU = 2  # ranks and engines mostly work one after the other
# Oldest driver of a major CUDA version, https://docs.nvidia.com/deploy/cuda-compatibility/
_OLDEST_DRIVERS = {12: 525, 13: 580}
_DRIVER = Path("/proc/driver/nvidia/version")
_COMPATIBILITY = Path("/usr/local/cuda/compat/libcuda.so.1")
_ADAPTERS, _VERBS = Path("/sys/class/infiniband"), Path("/dev/infiniband")
_PROVIDERS = ("/usr/lib/*/libibverbs/lib*.so", "/usr/lib64/libibverbs/lib*.so", "/usr/lib/libibverbs/lib*.so")
_CAP_IPC_LOCK = 1 << 14  # linux/capability.h


def python_version(situation: Situation, version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if _OLDEST <= version[:2] < _TOO_NEW:
        yield ok("Python", text)
    else:
        yield fail("Python", text, "use Python 3.11, 3.12 or 3.13")


def packages(situation: Situation) -> Iterator[Finding]:
    """Installed versions against those that slime declares."""
    from packaging.requirements import Requirement

    fitting = 0
    for line in importlib.metadata.requires("slime") or []:
        requirement = Requirement(line)
        # Requirements of extras are optional.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield fail(
                "package", f"{requirement.name} is not installed", f"pip install '{requirement}' (or: make setup)"
            )
            continue
        if requirement.specifier.contains(found, prereleases=True):
            fitting += 1
        else:
            wanted = str(requirement.specifier)
            yield fail("package", f"{requirement.name} {found}, supported is {wanted}", f"pip install '{requirement}'")
    engines = (f"{name} {_version(name)}" for name in ("sglang", "megatron-core", "ray", "transformers"))
    yield ok("packages", f"{fitting} fit: {', '.join(engines)}")


def device(situation: Situation) -> Iterator[Finding]:
    """GPU or CPU mode, and whether torch was built for it. Does not import torch."""
    torch = _version("torch")
    try:
        mode = accelerator.current().name
    except ConfigError as error:
        yield fail("device", str(error), "unset SLIME_ACCELERATOR")
        return
    has_driver = accelerator.has_driver()
    if mode == "cuda" and not has_driver:
        yield fail("device", f"cuda mode, torch {torch}, but no GPU driver", "load it, or set SLIME_ACCELERATOR=cpu")
    elif mode == "cpu" and has_driver:
        fix = "install a CUDA build of torch, or set SLIME_ACCELERATOR=cpu if this is intended"
        meant = os.environ.get("SLIME_ACCELERATOR") == "cpu"
        yield (
            ok("device", f"cpu by SLIME_ACCELERATOR, torch {torch}")
            if meant
            else warn("device", f"cpu mode on a machine with a GPU, torch {torch}", fix)
        )
    else:
        yield ok("device", f"{mode} mode, torch {torch}, {os.cpu_count()} cores")


def driver(situation: Situation) -> Iterator[Finding]:
    """The NVIDIA driver against the CUDA version that torch was built for. Does not import torch."""
    wanted, found = _cuda_of_torch(), _first(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER)
    if wanted is None or found is None:
        return
    oldest = _OLDEST_DRIVERS.get(int(wanted.partition(".")[0]), 0)
    value = f"{found}, torch is built for CUDA {wanted}"
    if int(found.partition(".")[0]) >= oldest:
        yield ok("driver", value)
    elif _COMPATIBILITY.exists():
        fix = (
            f"update it to {oldest} or newer if kernels fail to load: {_COMPATIBILITY} supports some older drivers only"
        )
        yield warn("driver", f"{value}, which needs {oldest} or newer", fix)
    else:
        fix = f"update it, or install the package cuda-compat of CUDA {wanted} (data-center GPUs)"
        yield fail("driver", f"{value}, which needs {oldest} or newer", fix)


def _cuda_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    return None if spec is None else _first(r"(?m)^cuda\b.*'([\d.]+)'", Path(spec.origin or "").parent / "version.py")


def _first(pattern: str, file: Path) -> str | None:
    """The group of the first match in ``file``. None without the file or a match."""
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found and found[1]


def kernels(situation: Situation) -> Iterator[Finding]:
    """Optional kernels: their versions against those that megatron-core supports, and those that the model needs."""
    from packaging.requirements import Requirement

    if accelerator.current().is_cpu:
        return
    for line in importlib.metadata.requires("megatron-core") or []:
        requirement = Requirement(line)
        found = _version(requirement.name)
        if requirement.name not in _KERNELS or "dev" not in str(requirement.marker):
            continue
        requirement.marker = None
        options, users = _KERNELS[requirement.name]
        if found == "missing":
            if _uses(situation, requirement.name):
                value = f"{requirement.name} is not installed, {users}"
                yield warn("kernels", value, f"pip install {options}'{requirement}'")
        elif requirement.specifier.contains(found, prereleases=True):
            yield ok("kernels", f"{requirement.name} {found}")
        else:
            value = f"{requirement.name} {found}, megatron-core {_version('megatron-core')} supports"
            fix = f"pip install {options}'{requirement}'"
            yield fail("kernels", f"{value} {requirement.specifier}", fix)


# Package -> (options of pip, effect of its absence).
_KERNELS = {
    "flash-linear-attention": ("", "gated delta nets run in plain torch, which is much slower"),
    "transformer-engine": ("--no-build-isolation ", "--fp8-format and --transformer-impl transformer_engine need it"),
}


def _uses(situation: Situation, package: str) -> bool:
    """Whether the command uses the kernels of ``package``."""
    args = situation.args
    if args is None or args.debug_rollout_only:
        return False
    if package == "transformer-engine":
        return vars(args).get("transformer_impl") == package.replace("-", "_") or bool(vars(args).get("fp8"))
    try:
        return read_shape(args).delta_net is not None and args.qwen_gdn_backend == "fla"
    except PlanError:
        return False


def infiniband(situation: Situation) -> Iterator[Finding]:
    """Adapters of InfiniBand or RoCE: NCCL uses TCP, without an error, if one of these is missing."""
    adapters = sorted(path.name for path in _ADAPTERS.iterdir()) if _ADAPTERS.is_dir() else []
    if not adapters:
        return
    what, names = "InfiniBand", f"{len(adapters)} adapters ({', '.join(adapters[:4])})"
    problems = 0
    if not any(_VERBS.glob("uverbs*")):
        yield fail(what, f"{names}, but no {_VERBS}/uverbs*", f"docker run --device={_VERBS} --network=host")
        problems += 1
    if not any(any(Path("/").glob(pattern.removeprefix("/"))) for pattern in _PROVIDERS):
        fix = "apt-get install ibverbs-providers rdma-core"
        yield fail(what, f"{names}, but libibverbs has no driver for any adapter (libibverbs/lib*.so)", fix)
        problems += 1
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int(_first(r"CapEff:\s*(\w+)", Path("/proc/self/status")) or "0", 16)
    if soft != resource.RLIM_INFINITY and not capabilities & _CAP_IPC_LOCK:
        fix = "ulimit -l unlimited, or docker run --ulimit memlock=-1 --cap-add=IPC_LOCK"
        yield fail(what, f"{names}, but a process may lock {size(soft)} only, and RDMA locks its buffers", fix)
        problems += 1
    if not problems:
        yield ok(what, names)


def host_name(situation: Situation) -> Iterator[Finding]:
    """With several nodes the name of the host must not be a loopback address: gloo listens on it."""
    try:
        args = situation.args
        num_nodes = 1 if args is None else plan_placement(args, read_layout(args)).num_nodes
    except PlanError:
        return
    # A run without GPUs starts all its slots on this host.
    is_alone = num_nodes == 1 or (accelerator.current().is_cpu and not os.environ.get("RAY_ADDRESS"))
    if is_alone or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield fail("host name", f"{name} has no address: {error}", "add it to /etc/hosts with the node's address")
        return
    if address.startswith("127."):
        fix = (
            "set GLOO_SOCKET_IFNAME to the network interface (SOCKET_IFNAME of the launch scripts), see ip -br address"
        )
        yield fail("host name", f"{name} is {address}, which the other nodes of the run cannot reach", fix)
    else:
        yield ok("host name", f"{name} is {address}")


def memory(situation: Situation) -> Iterator[Finding]:
    """Host memory against that of the run: with GPUs its copies and states, in CPU mode its processes."""
    import psutil

    free = psutil.virtual_memory().available
    needed = _host_bytes(situation)
    value = f"{size(free)} available" + (f", the run needs about {size(needed)}" if needed else "")
    if needed > free:
        yield fail("memory", value, "use a smaller model, fewer processes (see slime plan), or a larger machine")
    else:
        yield ok("memory", value)


def processors(situation: Situation) -> Iterator[Finding]:
    """Without a GPU trainer ranks and engines share the processors, and many of them slow each other down."""
    if situation.args is None or not accelerator.current().is_cpu:
        return
    try:
        placement = plan_placement(situation.args, read_layout(situation.args))
    except PlanError:
        return
    num_engines = sum(group.num_devices for group in placement.engines)
    value = f"{num_cpus()} for {placement.num_trainer_ranks} trainer ranks and {num_engines} engine devices"
    if placement.num_trainer_ranks + num_engines > _MOST_PER_CPU * num_cpus():
        yield warn("processors", value, "use fewer: --actor-num-gpus-per-node 1 --rollout-num-gpus 1")
    else:
        yield ok("processors", value)


def _host_bytes(situation: Situation) -> int:
    """Host memory of a node: without GPUs shares of the model, Python and its libraries. 0 if unknown."""
    from slime.config.plan import build

    if situation.args is None:
        return 0
    # The size of a device has no influence on host memory.
    plan = build(situation.args, title="", device_bytes=1, is_cpu=accelerator.current().is_cpu)
    return plan.host.total if plan.host else 0


def open_files(situation: Situation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {_GOOD_OPEN_FILES} in the shell that starts Ray (the hard limit is {hard})"
    if soft < _MIN_OPEN_FILES:
        yield fail("open files", f"ulimit -n is {soft}; Ray needs at least {_MIN_OPEN_FILES}", fix)
    else:
        yield ok("open files", f"ulimit -n is {soft}")


def shared_memory(situation: Situation) -> Iterator[Finding]:
    """Room for Ray's object store in /dev/shm. If it is too small, Ray falls back to the disk, which is far slower."""
    import psutil

    if not _SHM.is_dir():
        yield fail("shared memory", "/dev/shm is missing", "mount a tmpfs there for Ray's object store")
        return
    state = os.statvfs(_SHM)
    free = state.f_bavail * state.f_frsize
    is_cpu = accelerator.current().is_cpu
    wanted = _CPU_OBJECT_STORE if is_cpu else round(_RAY_SHARE * psutil.virtual_memory().total)
    value = f"{size(free)} free in /dev/shm, Ray's object store takes {size(wanted)}"
    if free < wanted:
        yield fail(
            "shared memory", value, f"enlarge it: docker run --shm-size={size(2 * wanted).replace(' ', '')[:-2]}B"
        )
    else:
        yield ok("shared memory", value)


def ports(situation: Situation) -> Iterator[Finding]:
    """Ports of the engines, and of the router if --sglang-router-port is given."""
    args = situation.args
    values = vars(args) if args is not None else {}
    per_engine = values.get("rollout_num_gpus_per_engine") or 1
    num_engines = (values.get("rollout_num_gpus") or 8) // per_engine
    span = range(FIRST_SERVICE_PORT, FIRST_SERVICE_PORT + 1000)
    needed = num_engines * _PORTS_PER_ENGINE
    # Stops at the needed number: testing a port opens a socket.
    free = len(list(itertools.islice((port for port in span if is_port_free("0.0.0.0", port)), needed)))
    if free < min(needed, len(span)):
        taken = f"{free} free ports from {span.start} to {span.stop - 1}, {num_engines} engines need {needed}"
        yield fail("ports", taken, "end the processes that listen there: ss -ltnp")
    else:
        yield ok("ports", f"at least {free} free from {span.start} for {num_engines} engines")
    router_port, address = values.get("sglang_router_port"), values.get("sglang_router_ip")
    # With an address, the port belongs to a router that runs already.
    if router_port is not None and address is None and not is_port_free("0.0.0.0", router_port):
        yield fail(
            "router port",
            f"--sglang-router-port {router_port} is in use",
            "leave it out, or end the process that listens there",
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


# Slow checks, only with ``--deep``. Each runs in a new process.

_MODULES = ("torch", "transformers", "ray", "sglang.srt.server_args", "megatron.core", "sglang_router")
_TIMEOUT_S = 300.0
_COMPUTE = """
import torch
from slime.utils import accelerator
device = accelerator.current().device()
x = torch.eye(64, device=device) * 2
assert float((x @ x).sum()) == 256.0
name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
print(f"{max(1, accelerator.current().num_devices())} x {name}, torch {torch.__version__}")
"""


def imports(situation: Situation, modules: tuple[str, ...] = _MODULES) -> Iterator[Finding]:
    """Every engine's package imports."""
    if not situation.is_deep:
        return
    for module in modules:
        started = time.monotonic()
        output, error = _python(f"import {module}")
        if error:
            yield fail("import", f"{module}: {error}", "reinstall it: make setup")
        else:
            yield ok("import", f"{module} in {time.monotonic() - started:.1f} s{output}")


def device_works(situation: Situation, code: str = _COMPUTE) -> Iterator[Finding]:
    """A product of two matrices on the device."""
    if not situation.is_deep:
        return
    output, error = _python(code)
    if error:
        yield fail("compute", error, "check the driver (nvidia-smi) and torch's CUDA version")
    else:
        yield ok("compute", output)


def _python(code: str) -> tuple[str, str]:
    """(last line of the output, last line of the error or an empty text)."""
    # In another process: an import that crashes must not end the doctor.
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_TIMEOUT_S:.0f} s"
    output = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0:
        return "".join(output), ""
    return "", "".join(done.stderr.strip().splitlines()[-1:]) or f"exit status {done.returncode}"
