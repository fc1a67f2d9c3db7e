"""One inference engine: an SGLang server process and the HTTP verbs that control it.

An engine over several nodes has one process on each node. The processes find each other, and the first serves HTTP.

``slime.ray`` makes an actor of the class and may call it from several threads. Does not import SGLang. Every call has a
deadline: the start that of ``StartProgress``, calls of a weight sync ``--weight-sync-timeout``, questions a minute.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from slime.backends.sglang_utils.checksum import read_checksums
from slime.backends.sglang_utils.engine_adapters import AdapterCalls
from slime.backends.sglang_utils.server_process import Activity, NodeServer, OtherNode, StartProgress
from slime.backends.sglang_utils.topology import WorkerType
from slime.config.arguments import SyncArgs
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import DeadlineExceeded, EngineError, EngineSilent
from slime.utils.net import url_host
from slime.utils.process import log_tail

_POLL_S = 0.1
_WATCH_EVERY_S = 0.5
# Shorter than the server's five seconds: a request on a connection that the server is closing would be lost.
_KEEPALIVE_S = 2.0
# The kinds of memory that a server can release.
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
START_TIMEOUT_S = 3600.0  # default of --engine-start-timeout, more for a checkpoint above 600 GB
_CONTROL_TIMEOUT_S = 60.0  # of calls that change nothing in the engine's memory
_LOADS = "/v1/loads?include=core"
_REGISTER_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_ENDING_S = 5.0  # from the loss of a connection to the end of the server's process


@dataclass(frozen=True)
class EngineSpec:
    """Parameters of one engine.

    Attributes:
        rank: number of the engine in the run.
        argv: SGLang server flags.
        env: environment on top of this process's.
        start_timeout_s: ``--engine-start-timeout``.
        sync_timeout_s: ``--weight-sync-timeout``.
        fork_server_socket: socket of the preloading process on this host, or None to start SGLang from scratch.
        num_gpus: tensor-parallel ranks, on all nodes.
        worker_type: the type under which it is registered with the router.
        bootstrap_port: port on which decode engines request its cache (prefill engines only).
    """

    rank: int
    host: str
    port: int
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    start_timeout_s: float = START_TIMEOUT_S
    sync_timeout_s: float = SyncArgs.weight_sync_timeout
    fork_server_socket: str | None = None
    num_gpus: int = 1
    worker_type: WorkerType = WorkerType.REGULAR
    bootstrap_port: int | None = None


class _ClientOfThread(threading.local):
    """One HTTP client per thread that uses it."""

    # A shared httpx client may close an idle connection that is past its time although another thread was just given
    # it. That thread's request fails with "Bad file descriptor".
    def __init__(self, url: str) -> None:
        self.client = httpx.Client(
            base_url=url,
            timeout=_CONTROL_TIMEOUT_S,
            trust_env=False,  # engines and router are inside the cluster, which the user's proxy cannot reach
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S),
        )


class SGLangEngine(AdapterCalls):
    """An engine. Its server and all children of the server are killed when this process ends.

    Args:
        other_nodes: the parts of this engine on other nodes. They start and end with the part on this node.
    """

    def __init__(self, spec: EngineSpec, other_nodes: Sequence[OtherNode] = ()) -> None:
        self._spec = spec
        self._other_nodes = other_nodes
        self._server = NodeServer(
            spec.argv, env=spec.env, log_path=spec.log_path, fork_server_socket=spec.fork_server_socket
        )
        self._lost_part = ""
        self._stopping = threading.Event()
        self._released: set[str] = set()
        self._clients = _ClientOfThread(self.url)

    @property
    def _client(self) -> httpx.Client:
        return self._clients.client

    @property
    def url(self) -> str:
        return f"http://{url_host(self._spec.host)}:{self._spec.port}"

    def start(self) -> None:
        """Launch the server and return when it answers.

        Raises:
            EngineError: it died, stopped to work, or reached the limit. Contains the last lines of its log.
        """
        spec = self._spec
        deadline = Deadline(spec.start_timeout_s, f"engine {spec.rank} to start", "--engine-start-timeout")
        progress = StartProgress(f"engine {spec.rank} ({self.url})", spec.start_timeout_s)
        for node in self._other_nodes:
            node.start()
        self._server.start(deadline)
        while not self._answers():
            self.raise_if_dead()
            if lost := self._lost_node():  # the first node would wait for it until its timeout
                self.stop()
                raise EngineError(f"engine {spec.rank} ({self.url}) did not start: {lost}")
            if failure := progress.failure(self._activities):
                self.stop()
                raise EngineError(f"{failure}. Last lines of {spec.log_path}:\n{log_tail(spec.log_path)}")
            time.sleep(_POLL_S)
        self._server.note_parts()
        for node in self._other_nodes:
            node.note_parts()
        threading.Thread(target=self._watch_parts, name=f"parts of engine {spec.rank}", daemon=True).start()

    def _activities(self) -> list[Activity | None]:
        return [self._server.activity(), *(node.activity() for node in self._other_nodes)]

    def _watch_parts(self) -> None:
        """Stop the server when it has lost a part. Body of a thread."""
        # SGLang itself takes many seconds to notice it and does not answer meanwhile.
        while self.is_alive() and not self._stopping.wait(_WATCH_EVERY_S):
            part = self._server.lost_part()
            lost = self._lost_node() if part is None else f"its process {part} had ended"
            if lost is not None and self.is_alive() and not self._stopping.is_set():
                self._lost_part = f", stopped because {lost}"
                self._server.stop()
                return

    def _lost_node(self) -> str | None:
        """The reason why a part on another node ended, or None while all parts run."""
        return next((lost for node in self._other_nodes if (lost := node.lost()) is not None), None)

    def _is_ok(self, path: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
        try:
            return self._client.get(path, timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False

    def _answers(self) -> bool:
        return self._is_ok("/model_info") and self._listens()

    def _listens(self) -> bool:
        """Whether the port belongs to this server."""
        # After a collision of ports the server of another run would answer the readiness request as well.
        assert self._server.process is not None
        try:
            main = psutil.Process(self._server.process.pid)
            return any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._spec.port
                for process in (main, *main.children(recursive=True))
                for connection in process.net_connections("tcp")
            )
        except psutil.Error:  # one of the processes has just ended
            return False

    def is_alive(self) -> bool:
        return self._server.process is not None and self._server.exit_code() is None

    def has_ended(self) -> bool:
        """True if the server, or one of its necessary child processes, has ended."""
        return not self.is_alive() or self._server.lost_part() is not None

    def is_responsive(self, timeout_s: float) -> bool:
        """True if the scheduler works: it produces a token, or reports its load, within ``timeout_s``."""
        # A deterministic engine gets no test request: a greedy request in the batch changes the sampling of the others.
        if "--enable-deterministic-inference" in self._spec.argv:
            try:
                return self._request("GET", _LOADS, timeout_s=timeout_s, needs="loads")["loads"] is not None
            except EngineError:
                return False
        # not /health, which the HTTP process answers even if the scheduler hangs
        return self._is_ok("/health_generate", timeout_s)

    def raise_if_dead(self) -> None:
        """Raise the cause if the server process has ended."""
        if (status := self._server.exit_code()) is not None:
            raise EngineError(
                f"engine {self._spec.rank} ({self.url}) died with status {status}{self._lost_part}. "
                f"Last lines of {self._spec.log_path}:\n{log_tail(self._spec.log_path)}"
            )

    def stop(self) -> None:
        """Kill the server and everything it started."""
        self._stopping.set()
        self._server.stop()
        if self._other_nodes:
            with ThreadPoolExecutor(len(self._other_nodes)) as pool:
                list(pool.map(lambda node: node.stop(), self._other_nodes))

    def register(self, router_url: str) -> None:
        """Register with the router. Returns when it sends requests here."""
        worker: dict[str, Any] = {"url": self.url, "worker_type": self._spec.worker_type.value}
        if self._spec.bootstrap_port is not None:
            worker["bootstrap_port"] = self._spec.bootstrap_port
        # The router starts at the same time. An external engine, which runs already, may be ready first.
        what = f"the router at {router_url} to listen"
        with suppress(DeadlineExceeded):  # the request below names the engine and the network's error
            wait_until(lambda: _listens(router_url), Deadline(_REGISTER_TIMEOUT_S, what))
        if self._is_known_to(router_url):
            return
        self._request("POST", f"{router_url}/workers", worker)  # the reply comes before the router checks the engine
        what = f"the router at {router_url} to take engine {self._spec.rank}"
        fix = f"It must reach {self.url} from where it runs; see its log"
        wait_until(lambda: self._is_known_to(router_url), Deadline(_REGISTER_TIMEOUT_S, what, fix))

    def _is_known_to(self, router_url: str) -> bool:
        workers = self._request("GET", f"{router_url}/workers", needs="workers")["workers"]
        return any(worker["url"] == self.url for worker in workers)

    def health(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
        """True if the HTTP process answers in time."""
        return self._is_ok("/health", timeout_s)

    def pause_generation(self, mode: str = "retract") -> None:
        """Stop generating. ``retract`` returns running requests to the queue, for recomputation with new weights."""
        self._change("pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._change("continue_generation", {"torch_empty_cache": False})

    def begin_weight_update(self) -> None:
        self._change("begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._change("end_weight_update", {})

    def flush_cache(self, timeout_s: float | None = None) -> None:
        """Forget every cached prefix. Waits up to ``timeout_s`` (None: the deadline of syncs) for running requests."""
        seconds = self._spec.sync_timeout_s if timeout_s is None else timeout_s
        self._change(f"flush_cache?timeout={seconds:g}", None, seconds)

    def release_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Release memory of these kinds, with its content. No request may be running. Idempotent."""
        held = [tag for tag in tags if tag not in self._released]
        if held:
            self._change("release_memory_occupation", {"tags": held})
            self._released.update(held)

    def resume_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take memory of these kinds again. Idempotent."""
        # only released kinds: SGLang crashes on a kind that it still holds
        released = [tag for tag in tags if tag in self._released]
        if released:
            self._change("resume_memory_occupation", {"tags": released})
            self._released.difference_update(released)

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._change("init_weights_update_group", body)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a group. Succeeds for a fresh engine without the group."""
        self._change("destroy_weights_update_group", {"group_name": group_name}, is_checked=False)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Receive one bucket over the group. The trainer broadcasts it during this call."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "load_format": load_format,
            "weight_version": weight_version,
        }
        self._change("update_weights_from_distributed", body)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = "flattened_bucket",
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load one bucket from memory of this host. Takes one serialized handle per tensor-parallel rank."""
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        self._change("update_weights_from_tensor", body)

    def update_weights_from_disk(
        self, model_path: str, weight_version: str | None = None, flush_cache: bool = False
    ) -> None:
        """Load a whole checkpoint. If it cannot be read, the weights do not change."""
        body = {"model_path": model_path, "flush_cache": flush_cache, "weight_version": weight_version}
        self._change("update_weights_from_disk", body)

    def weight_version(self) -> str:
        return str(self._request("GET", "/model_info", needs="weight_version")["weight_version"])

    def num_requests(self) -> int:
        """Requests that run or wait in the scheduler."""
        loads = self._request("GET", _LOADS, needs="loads")["loads"]
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)

    def rank_checksums(self) -> list[tuple[int, dict[str, str]]]:
        """For each tensor-parallel rank its number, and a checksum of each of its tensors by name."""
        ranks = self._change("weights_checker", {"action": "checksum"}, needs="ranks")["ranks"]
        try:
            return read_checksums(ranks)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise EngineError(f"engine {self._spec.rank} ({self.url}): no checksums in {str(ranks)[:500]}") from None

    def reset_weights(self) -> None:
        """Overwrite every tensor with random values."""
        self._change("weights_checker", {"action": "snapshot"})
        self._change("weights_checker", {"action": "reset_tensors"})

    def compare_weights(self) -> None:
        """Fail unless every tensor equals its value before :meth:`reset_weights`."""
        self._change("weights_checker", {"action": "compare"})

    def abort_all(self) -> None:
        self._change("abort_request", {"abort_all": True}, _CONTROL_TIMEOUT_S)

    def _change(
        self,
        verb: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None = None,
        *,
        is_checked: bool = True,
        needs: str | None = None,
    ) -> dict[str, Any]:
        """POST with the deadline of weight syncs, unless ``timeout_s`` is given."""
        seconds = self._spec.sync_timeout_s if timeout_s is None else timeout_s
        return self._request("POST", f"/{verb}", body, seconds, is_checked=is_checked, needs=needs)

    def _request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _CONTROL_TIMEOUT_S,
        *,
        is_checked: bool = True,
        needs: str | None = None,
    ) -> dict[str, Any]:
        """One HTTP call. ``needs``: key that the answer must have."""
        try:
            response = self._client.request(method, url, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):  # a dying server closes these first
                with suppress(DeadlineExceeded):
                    wait_until(lambda: not self.is_alive(), Deadline(_ENDING_S, "the server to end"))
            self.raise_if_dead()  # a death is the better explanation of a broken connection
            message = f"engine {self._spec.rank} ({self.url}): {method} {url}: {type(error).__name__}: {error}"
            if isinstance(error, httpx.TimeoutException):
                raise EngineSilent(f"{message} within {timeout_s:.0f} s", [self.url]) from error
            raise EngineError(message) from error
        body = self._checked(url.removeprefix("/"), response) if is_checked else {}
        if needs is not None and needs not in body:
            raise EngineError(
                f"engine {self._spec.rank} ({self.url}): {method} {url}: no {needs!r} in {response.text[:500]}"
            )
        return body

    def _checked(self, verb: str, response: httpx.Response) -> dict[str, Any]:
        body = _json_object(response)
        # both: the server reports some failures with status 200
        if response.status_code >= 400 or body.get("success") is False:
            raise EngineError(
                f"engine {self._spec.rank} ({self.url}) refused {verb}: status {response.status_code}: "
                f"{response.text[:2000]}"
            )
        return body


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {"list": body} if isinstance(body, list) else {}


def _listens(url: str) -> bool:
    address = httpx.URL(url)
    try:
        with socket.create_connection((address.host, address.port or 80), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
