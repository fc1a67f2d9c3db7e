"""Engines that run outside of slime: queried, used and watched, but never started or stopped.

``--rollout-external-engine-addrs`` names them. :func:`discover_external_engines` queries each of them before anything
starts. :class:`ExternalEngine` has the methods of an engine, without a process.
"""

from __future__ import annotations

import json
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from slime.backends import EngineInfo, weights_dtype
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.feature_rules import problems_of_server
from slime.backends.sglang_utils.topology import WorkerType
from slime.config.arguments import SyncArgs
from slime.utils.async_utils import Deadline
from slime.utils.errors import ConfigError, EngineError
from slime.utils.net import url_host

# The reason why an engine with pipeline stages receives no weights.
ONE_STAGE = (
    "SGLang confirms new weights when its first stage has them (scheduler.py, init_ipc_channels), which may be before "
    "later stages read them, and gives every stage the same ranks in a broadcast (weight_updater.py, "
    "init_weights_update_group)"
)

logger = logging.getLogger(__name__)

_FLAG = "--rollout-external-engine-addrs"
_TIMEOUT_S = 30.0
_LOOK_TIMEOUT_S = 2.0
_POLL_S = 0.5
_REPORT_EVERY_S = 60.0
_LONG_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
}


@dataclass(frozen=True)
class ExternalEngineInfo:
    """The properties that an engine reports.

    Attributes:
        num_gpus: ranks of one copy of the model, all of which take part in a weight update.
        disaggregation_bootstrap_port: of prefill engines.
        server_info: the whole answer, every field of the server by name.
    """

    url: str
    host: str
    port: int
    worker_type: str
    num_gpus: int
    disaggregation_bootstrap_port: int | None = None
    server_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_pd_worker(self) -> bool:
        return self.worker_type in (WorkerType.PREFILL, WorkerType.DECODE)

    @classmethod
    def of_all(cls, infos: Sequence[Mapping[str, Any]]) -> list[ExternalEngineInfo]:
        """Those that a step of ``rules`` has put into the arguments as ``rollout_external_engine_infos``."""
        return [cls(**info) for info in infos]


def normalize_external_engine_addr(addr: str) -> str:
    """``host:port`` or ``http://host:port`` -> the url without a slash at its end.

    Raises:
        ConfigError: ``addr`` has another form.
    """
    url = (addr if "://" in addr else f"http://{addr}").rstrip("/")
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
        is_complete &= not (parts.path or parts.query)
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigError(
            f"{_FLAG} {addr} must be HOST:PORT or http://HOST:PORT, an IPv6 address in brackets: http://[::1]:30000."
        )
    return url


def discover_external_engines(
    addrs: Sequence[str], timeout: float = _TIMEOUT_S, *, source: str = _FLAG
) -> list[ExternalEngineInfo]:
    """Query the properties of all engines concurrently.

    Args:
        source: origin of the addresses, for messages.

    Raises:
        ConfigError: with one problem per address that is malformed, given twice, or does not answer in time.
    """
    problems: list[str] = []
    urls: list[str] = []
    for addr in addrs:
        try:
            url = normalize_external_engine_addr(addr)
        except ConfigError as error:
            problems += error.problems
            continue
        if url in urls:
            problems.append(f"{source} {addr} is given twice.")
        urls.append(url)

    def ask(url: str) -> ExternalEngineInfo | str:
        try:
            return _info(url, get_server_info(url, timeout))
        except EngineError as error:
            return f"{source} {url}: {error}"

    if not problems:
        with ThreadPoolExecutor(min(32, len(urls) or 1)) as pool:
            answers = list(pool.map(ask, urls))
        problems = [answer for answer in answers if isinstance(answer, str)]
    if problems:
        raise ConfigError(problems)
    return [answer for answer in answers if not isinstance(answer, str)]


def get_server_info(url: str, timeout: float = _TIMEOUT_S) -> dict[str, Any]:
    """Every field of the server at ``url``. Raises EngineError if neither of its two routes answers."""
    reasons = []
    for route in ("/server_info", "/get_server_info"):
        try:
            reply = httpx.get(url + route, timeout=timeout, trust_env=False)
            info = reply.raise_for_status().json()
            if isinstance(info, dict):
                return info
            reasons.append(f"{route}: not a JSON object: {reply.text[:200]}")
        except (httpx.HTTPError, ValueError) as error:
            reasons.append(f"{route}: {type(error).__name__}: {error}")
    raise EngineError(f"no SGLang server answers: {'; '.join(reasons)}. Start it first, or leave it out.")


def _info(url: str, answer: Mapping[str, Any]) -> ExternalEngineInfo:
    parts = urlsplit(url)
    mode = answer.get("disaggregation_mode")
    kind = WorkerType.REGULAR
    if answer.get("encoder_only"):
        kind = WorkerType.ENCODER
    elif mode in (WorkerType.PREFILL, WorkerType.DECODE):
        kind = WorkerType(str(mode))
    bootstrap = answer.get("disaggregation_bootstrap_port") if kind is WorkerType.PREFILL else None
    assert parts.hostname is not None
    assert parts.port is not None
    return ExternalEngineInfo(
        url,
        url_host(parts.hostname),
        parts.port,
        kind.value,
        _number(answer, "tp_size") * _number(answer, "pp_size"),
        bootstrap,
        dict(answer),
    )


def _number(answer: Mapping[str, Any], name: str) -> int:
    """A parallel size under its short or its long name."""
    return int(answer.get(name) or answer.get(_LONG_NAMES.get(name, name)) or 1)


# Settings by which a device may load experts of other blocks, or keep them elsewhere.
_MOVES_EXPERTS = (
    "ep_num_redundant_experts",
    "enable_eplb",
    "elastic_ep_backend",
    "ep_join_mode",
    "enable_paged_experts",
    "enable_waterfill",
    "kt_weight_path",
)


def expert_blocks(answer: Mapping[str, Any]) -> int:
    """Of :class:`EngineInfo`, from all fields of a server. 1 if a setting may move experts.

    From ``FusedMoE._map_global_expert_id_to_local_expert_id`` and ``derive_spawn_ranks`` of SGLang 0.5.23: without such
    a setting, a device ignores experts outside of its block in every update.
    """
    is_usual = answer.get("init_expert_location") in (None, "trivial") and not any(map(answer.get, _MOVES_EXPERTS))
    is_one_copy = _number(answer, "moe_dp_size") == 1 and _number(answer, "pp_size") == 1
    return _number(answer, "ep_size") if is_usual and is_one_copy else 1


def engine_info(url: str, num_gpus: int, first_slot: int | None, answer: Mapping[str, Any]) -> EngineInfo:
    """What the trainer must know of an engine, from all fields of its server."""
    # names and rules of ``parallel_widths_of`` in SGLang 0.5.23
    schedulers = _number(answer, "dp_size") if answer.get("enable_dp_attention") else 1
    copies = schedulers * _number(answer, "attn_cp_size")
    head_copies = copies if answer.get("enable_dp_lm_head") else 1
    return EngineInfo(url, num_gpus, first_slot, expert_blocks(answer), copies, head_copies, schedulers)


def problems_of(info: ExternalEngineInfo, args: Namespace, *, source: str = _FLAG) -> Iterator[str]:
    """The differences between an engine and the needs of the run, one sentence each."""
    start = f"{source} {info.url}:"
    seen = info.server_info
    if args.use_rollout_routing_replay and not seen.get("enable_return_routed_experts"):
        yield f"{start} it does not return its expert choices: start it with --enable-return-routed-experts."
    wanted = weights_dtype(fp16=args.fp16, fp32=args.fp32)
    dtype = str(seen.get("dtype", "auto")).replace("half", "float16")
    if dtype not in ("auto", wanted) and not (dtype == "float" and wanted == "float32"):
        yield f"{start} its weights are {dtype}, the trainer's {wanted}: start it with --dtype {wanted}."
    if info.worker_type == WorkerType.ENCODER:
        yield f"{start} it only encodes images: such a server cannot receive weights, and its answers are no samples."
    if _number(seen, "pp_size") > 1 and not args.debug_rollout_only:
        yield f"{start} it has {_number(seen, 'pp_size')} pipeline stages: {ONE_STAGE}."
    if _number(seen, "dp_size") > 1 and not seen.get("enable_dp_attention"):
        yield f"{start} --dp-size {_number(seen, 'dp_size')}: one server per copy of the model can take weights."
    if info.worker_type == WorkerType.PREFILL and info.disaggregation_bootstrap_port is None:
        yield f"{start} a prefill engine needs --disaggregation-bootstrap-port."
    yield from (f"{start} {problem}" for problem in problems_of_server(args, seen))


class ExternalEngine(SGLangEngine):
    """The verbs of an engine whose process does not belong to this run.

    It counts as ended if its address does not answer any more, or if another server answers there.
    """

    shares_memory = False  # it may run on another host, or in a container

    def __init__(
        self,
        rank: int,
        info: ExternalEngineInfo,
        start_timeout_s: float,
        sync_timeout_s: float = SyncArgs.weight_sync_timeout,
    ) -> None:
        super().__init__(
            EngineSpec(
                rank,
                info.host,
                info.port,
                argv=(),
                env={},
                log_path=Path("-"),
                start_timeout_s=start_timeout_s,
                sync_timeout_s=sync_timeout_s,
                num_gpus=info.num_gpus,
                worker_type=WorkerType(info.worker_type),
                bootstrap_port=info.disaggregation_bootstrap_port,
            )
        )
        self._identity: str | None = None

    def start(self) -> None:
        """Return when the server answers and serves."""
        spec = self._spec
        fix = f"Start it again, or leave it out of {_FLAG}"
        what = f"the external engine {self.url} to answer"
        deadline, report_at_s = Deadline(spec.start_timeout_s, what, fix), _REPORT_EVERY_S
        while not self._answers():
            if deadline.elapsed >= report_at_s:
                report_at_s += _REPORT_EVERY_S
                logger.warning("has waited %.0f s for %s. %s", deadline.elapsed, what, fix)
            deadline.check()
            time.sleep(_POLL_S)
        self._identity = self._ask_identity(_TIMEOUT_S)
        # An earlier run may have ended in the middle of a weight sync. Unchecked: most servers are in no update.
        self._change("end_weight_update", {}, is_checked=False)
        self.continue_generation()

    def _listens(self) -> bool:
        return True  # the owner of a port on another host cannot be determined

    def _ask_identity(self, timeout_s: float) -> str:
        """Text that identifies the server process: the start times of its parts and its random seed."""
        # A server that was started again has the weights of its checkpoint, not those of this run.
        info = get_server_info(self.url, timeout_s)
        return json.dumps([info.get("startup_time"), info.get("random_seed")], sort_keys=True)

    def is_alive(self) -> bool:
        return not self.has_ended()

    def has_ended(self) -> bool:
        """True if nothing listens at the address. A slow server has not ended, see :meth:`is_responsive`."""
        try:
            self._client.get("/health", timeout=_LOOK_TIMEOUT_S)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False
        return False

    def is_responsive(self, timeout_s: float) -> bool:
        return super().is_responsive(timeout_s) and not self._is_another()

    def _is_another(self) -> bool:
        try:
            return self._identity is not None and self._ask_identity(_LOOK_TIMEOUT_S) != self._identity
        except EngineError:  # busy or dead: other checks decide that
            return False

    def raise_if_dead(self) -> None:
        if self.has_ended():
            cause = "nobody listens there any more"
        elif self._is_another():
            cause = "another server runs there now, which has not the weights of this run"
        else:
            return
        raise EngineError(
            f"external engine {self._spec.rank} ({self.url}): {cause}. Its log is where it was started. With "
            f"--use-fault-tolerance the run waits until it is back."
        )

    def stop(self) -> None:
        """Do nothing: the server does not belong to this run."""

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a group."""
        # An aborted run may have left a group of this name.
        self.destroy_weights_update_group(group_name)
        super().init_weights_update_group(master_address, master_port, rank_offset, world_size, group_name, backend)
