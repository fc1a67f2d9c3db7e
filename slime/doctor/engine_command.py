"""The command ``slime doctor engine``. Called by ``slime.cli``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

import slime
from slime.backends.sglang_utils.engine import SGLangEngine
from slime.backends.sglang_utils.external import ExternalEngine, discover_external_engines, get_server_info
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.training.arguments import LoraArgs
from slime.doctor import Finding, examine, exit_status, ok, render, render_json
from slime.models.config_json import load_model_config, text_part
from slime.utils import accelerator
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import EngineError
from slime.utils.net import PortClaim, claim_ports
from slime.utils.process import GuardedProcess, log_tail

if TYPE_CHECKING:
    from slime.doctor.engine_answers import Trial

SECTIONS = ("log_probs", "sampling", "stops", "experts", "images", "control", "weights", "adapters")
_START_TIMEOUT_S = 3600.0
_CONTEXT = 256  # tokens, enough for every check
_CPU_TOKENS = 16384
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_ANSWER_TIMEOUT_S = 5.0
ADAPTER_RANK, ADAPTER_ALPHA = 8, 16.0


def engine(words: Sequence[str]) -> int:
    """Compare an engine with transformers.

    Returns:
        0, or 1 if a check failed.

    Raises:
        SlimeError: the checkpoint cannot be read, or the engine does not start.
    """
    options = _parse(words)
    with _engine_of(options) as running:
        findings = findings_of(running, options.model, options.only, options.shares_memory)
    (render_json if options.json else render)(findings)
    return exit_status(findings)


def _parse(words: Sequence[str]) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="slime doctor engine",
        description="Compare an engine with transformers: log-probs, sampling, stops, experts, images, and the verbs "
        "of weight updates. Needs an idle engine: its weights change, and are the checkpoint's again at the end.",
        epilog="Words after -- are flags of the SGLang server.",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="Hugging Face checkpoint, which the engine serves"
    )
    parser.add_argument("--url", help="a running engine, started with the same checkpoint. Default: start one")
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="of an environment with another SGLang"
    )
    parser.add_argument("--dtype", default="auto", help="of an engine that is started; default: float32 on a CPU")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks of an engine that is started")
    parser.add_argument("--no-adapters", dest="adapters", action="store_false", help="start an engine without LoRA")
    parser.add_argument("--only", default=",".join(SECTIONS), help="of %(default)s")
    parser.add_argument("--shares-memory", action="store_true", help="the engine of --url is on this host")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    words, own = list(words), []
    if "--" in words:
        words, own = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    options.sglang_argv = own
    if unknown := sorted(set(options.only) - set(SECTIONS)):
        parser.error(f"--only {','.join(unknown)}: unknown. The sections are {', '.join(SECTIONS)}.")
    if options.url and own:
        parser.error(f"{' '.join(own)}: --url names an engine that runs already.")
    options.shares_memory |= options.url is None
    return options


def findings_of(
    running: SGLangEngine, model: str, only: Sequence[str] = SECTIONS, shares_memory: bool = True
) -> list[Finding]:
    """All findings of the sections ``only`` about an engine that serves ``model``."""
    from slime.doctor.engine_answers import ANSWERS
    from slime.doctor.engine_verbs import VERBS

    trial = trial_of(running, model, shares_memory)
    sections: Mapping[str, tuple[Callable[[Any], Iterator[Finding]], ...]] = ANSWERS | VERBS
    version = f"SGLang {trial.server.get('version')}, {trial.server.get('tp_size')} ranks, {trial.golden.dtype}"
    return [ok("engine", version), *examine(trial, [check for name in only for check in sections[name]])]


def trial_of(running: SGLangEngine, model: str, shares_memory: bool = True) -> Trial:
    """The engine beside transformers. Reads the checkpoint, in the precision of the engine."""
    # These import torch and transformers, which takes seconds.
    from slime.doctor.engine_answers import Trial
    from slime.doctor.engine_golden import Golden, context_of

    server = get_server_info(running.url)
    context = min(server.get("context_length") or context_of(model), context_of(model))
    return Trial(running, Golden(model, _dtype_of(server, model), context), server, shares_memory)


def _dtype_of(server: Mapping[str, Any], model: str) -> str:
    """``float32``, ``float16`` or ``bfloat16``."""
    config = load_model_config(model)
    stored = str(text_part(config).get("dtype") or config.get("dtype") or config.get("torch_dtype") or "float32")
    name = {"float": "float32", "half": "float16"}.get(str(server.get("dtype")), str(server.get("dtype")))
    # SGLang serves checkpoints in float32 as float16 if the precision is "auto"
    return name if name != "auto" else "float16" if stored == "float32" else stored


@contextmanager
def _engine_of(options: Namespace) -> Iterator[SGLangEngine]:
    if options.url is not None:
        (info,) = discover_external_engines([options.url], source="--url")
        yield ExternalEngine(0, info, _START_TIMEOUT_S)
        return
    host = "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as folder:
        # kept until the end of the block: the server binds them seconds from now
        ports = [claim_ports(host) for _ in range(2)]
        process = GuardedProcess(
            [options.python, "-m", "slime.backends.sglang_utils.server_process", *_argv(options, host, ports)],
            log_path=Path(folder, "log"),
            env=server_env() | {"PYTHONPATH": str(_importable(Path(folder)))},
        )
        try:
            yield _started(process, f"http://{host}:{ports[0].first}")
        finally:
            process.stop()


def _started(process: GuardedProcess, url: str) -> SGLangEngine:
    def is_ready() -> bool:
        if process.exit_code() is not None:
            tail = log_tail(process.log_path)
            raise EngineError(f"the engine died with status {process.exit_code()}. Its last lines:\n{tail}")
        try:
            return httpx.get(f"{url}/model_info", timeout=_ANSWER_TIMEOUT_S, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_ready, Deadline(_START_TIMEOUT_S, "the engine to start"))
    (info,) = discover_external_engines([url])
    engine = ExternalEngine(0, info, _START_TIMEOUT_S)
    engine.shares_memory = True
    return engine


def _argv(options: Namespace, host: str, ports: Sequence[PortClaim]) -> list[str]:
    """The flags with which a run starts an engine, so that it serves everything that the checks ask for."""
    from slime.doctor.engine_golden import context_of

    is_cpu = accelerator.current().is_cpu
    config = load_model_config(options.model)
    given = {word.partition("=")[0] for word in options.sglang_argv}
    sizes = {"--context-length": min(_CONTEXT, context_of(options.model))}
    sizes |= {"--max-total-tokens": _CPU_TOKENS} if is_cpu else {}
    more = [word for name, value in sizes.items() if name not in given for word in (name, str(value))]
    has_experts = any(text_part(config).get(name) for name in _EXPERTS)
    settings = {
        **{"hf_checkpoint": options.model, "sglang_argv": [*more, *options.sglang_argv], "seed": 1},
        **{"num_gpus_per_node": 8, "sglang_dtype": "float32" if is_cpu and options.dtype == "auto" else options.dtype},
        **{"offload_rollout": True, "update_weights_interval": 1, "update_weight_changed_only": False},
        "use_rollout_routing_replay": has_experts,
    }
    if not has_experts and "vision_config" not in config and options.adapters:
        settings |= vars(LoraArgs(lora_rank=ADAPTER_RANK, lora_alpha=ADAPTER_ALPHA))
    numbers = {"port": ports[0].first, "nccl_port": ports[1].first, "tp_size": options.tp_size}
    return build_argv(Namespace(**settings), rank=0, host=host, base_gpu_id=0, **numbers)


def _importable(folder: Path) -> Path:
    """A path on which another Python finds slime with its plugins of SGLang, and nothing else of this environment."""
    (folder / "slime").symlink_to(Path(slime.__file__).parent)
    mine, copy = distribution("slime"), folder / "slime-0.dist-info"
    copy.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (copy / name).write_text(mine.read_text(name) or "", encoding="utf-8")
    return folder
