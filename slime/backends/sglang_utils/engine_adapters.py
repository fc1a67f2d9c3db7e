"""The calls of an engine that serves a LoRA adapter beside its weights.

An adapter gets to the ranks of an engine through shared memory of their host: one copy for all of them, and requests of
a few kilobytes. It is put there while the engine still generates. Servers of others, which may run on another host or
in a container, get it in the request.
"""

from __future__ import annotations

import base64
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

from slime.backends.sglang_utils.server_process import OtherNode
from slime.backends.sglang_utils.topology import WorkerType
from slime.utils.errors import EngineError

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
# Torch's way of sharing is a setting of the process, and an actor answers calls in several threads.
_SHARING = threading.Lock()


class StagedAdapter:
    """The tensors of an adapter, ready to be read by the ranks of an engine.

    Args:
        tensors: all bytes, in the layout of SGLang's ``flattened_bucket``.
        metadata: name, shape, dtype and place of each tensor, as SGLang reads them.
        is_shared: the ranks run on this host and see its shared memory.
    """

    def __init__(self, tensors: bytes, metadata: Sequence[Any], *, is_shared: bool) -> None:
        import numpy as np
        import torch

        storage = _shared_memory(len(tensors)) if is_shared else None
        self._is_shared = storage is not None
        if storage is None:
            flat = torch.empty(len(tensors), dtype=torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        flat.numpy()[:] = np.frombuffer(tensors, np.uint8)
        self._content = {"metadata": list(metadata), "flattened_tensor": flat}

    def texts(self, num_ranks: int) -> list[str]:
        """What each rank reads: base64 of a pickle with the memory's name, or with all bytes."""
        if not self._is_shared:
            # n copies in one request: each rank reads the entry of its number (SGLang 0.5.23, deserialize_own_rank of
            # managers/tp_worker.py), and no field of the request is read by all ranks
            return [_text(pickle.dumps(self._content))] * num_ranks
        import torch.multiprocessing

        strategy: Any = torch.multiprocessing
        with _SHARING:
            before = strategy.get_sharing_strategy()
            # the default passes file descriptors, which only children of this process can receive
            strategy.set_sharing_strategy("file_system")
            try:
                # one pickle per rank: each counts as one user of the memory, until the rank that reads it frees it
                return [_text(ForkingPickler.dumps(self._content)) for _ in range(num_ranks)]
            finally:
                strategy.set_sharing_strategy(before)


def _shared_memory(size: int) -> Any:
    """A storage of ``size`` bytes. None if this host cannot share so much."""
    import torch

    try:
        # a full /dev/shm would end this process with SIGBUS at the first write
        if (free := shutil.disk_usage(_SHARED_MEMORY).free) <= size:
            raise OSError(f"{free} bytes are left")
        return torch.UntypedStorage._new_using_filename_cpu(size)
    except (OSError, RuntimeError) as error:  # torch's manager needs a socket in TMPDIR, whose path may be too long
        text = "%s cannot hold an adapter of %d bytes, so the engine gets one copy per rank in a request: %s"
        logger.warning(text, _SHARED_MEMORY, size, error)
        return None


def _text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


class AdapterCalls:
    """Part of :class:`slime.backends.sglang_utils.engine.SGLangEngine`."""

    shares_memory = True
    """The server's ranks see the shared memory of this process."""

    _other_nodes: Sequence[OtherNode]
    _staged: tuple[StagedAdapter, list[str]] | None = None
    _spec: Any
    _change: Callable[..., dict[str, Any]]
    _request: Callable[..., dict[str, Any]]

    def generate(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers to a request that is neither streamed nor routed, one for each of its prompts."""
        answer = self._change("generate", body)
        answers: list[dict[str, Any]] = answer.get("list", [answer])
        if any("meta_info" not in each for each in answers):
            raise EngineError(f"engine {self._spec.rank}: POST /generate: no 'meta_info' in {str(answer)[:500]}")
        return answers

    def adapters(self) -> list[str]:
        """The names of the adapters that requests may name."""
        models = self._request("GET", "/v1/models", needs="data")["data"]
        return [str(model["id"]) for model in models if model.get("parent") is not None]

    def stage_adapter(self, tensors: bytes, metadata: Sequence[Any], num_ranks: int, timeout_s: float) -> None:
        """Put an adapter into the memory of the engine's hosts, for its ranks. The engine may generate meanwhile."""
        nodes = self._other_nodes
        size = num_ranks // (len(nodes) + 1)  # SGLang numbers the ranks node by node
        with ThreadPoolExecutor(len(nodes) + 1) as pool:
            others = [pool.submit(node.stage_adapter, tensors, metadata, size, timeout_s) for node in nodes]
            adapter = StagedAdapter(tensors, metadata, is_shared=self.shares_memory)
            texts = adapter.texts(num_ranks - size * len(nodes))
            self._staged = adapter, texts + [text for other in others for text in other.result()]

    def load_staged_adapter(
        self, name: str, config: Mapping[str, Any], checksums: Mapping[str, str], version: str
    ) -> None:
        """Replace the adapter ``name`` by the staged one, which is ``version``.

        Args:
            config: content of adapter_config.json.
            checksums: SHA-256 of each tensor. Every rank compares them.
        """
        if self._staged is None:
            raise EngineError("no adapter is staged: stage_adapter() comes first, once per load")
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": self._staged[1],
            "load_format": "flattened_bucket",
            "expected_checksums": dict(checksums),
        }
        self._replace_adapter(name, "load_lora_adapter_from_tensors", body, version)
        self._staged = None  # the ranks keep the memory as long as they need it

    def load_adapter_files(self, name: str, path: str, version: str) -> None:
        """Replace the adapter ``name`` by that in the directory ``path``, which is ``version``."""
        self._replace_adapter(name, "load_lora_adapter", {"lora_name": name, "lora_path": path}, version)

    def _replace_adapter(self, name: str, verb: str, body: Mapping[str, Any], version: str) -> None:
        self._unload_adapter(name)
        self._change(verb, body)
        self.set_weight_version(version)

    def _unload_adapter(self, name: str) -> None:
        # not checked: a fresh engine has none. If an old one stays, SGLang refuses to load another under its name
        self._change("unload_lora_adapter", {"lora_name": name}, is_checked=False)

    def set_weight_version(self, version: str) -> None:
        """Set the version in every response from now on."""
        self._change("update_weight_version", {"new_version": version, "abort_all_requests": False})

    def probe(self, token_ids: Sequence[int], fields: Mapping[str, str]) -> dict[str, Any]:
        """The state of the adapter that ``fields`` of a request name.

        Returns:
            ``adapters``: the loaded ones. ``adapted``: log-probs of ``token_ids`` from the second on, of a request with
            ``fields``, None if it names an adapter that is not loaded. ``base``: those of a request without.
        """
        adapters = self.adapters()
        # SGLang would search the Hugging Face Hub for an adapter that was loaded before and is not now
        is_loaded = fields.get("lora_path", adapters[0] if adapters else "") in adapters
        base, *adapted = self._log_probs(token_ids, [{}, fields] if is_loaded else [{}])
        return {"adapters": adapters, "adapted": adapted[0] if adapted else None, "base": base}

    def canary(self, token_ids: Sequence[int], num_schedulers: int = 1) -> list[dict[str, Any]]:
        """Let every scheduler score the second half of a prompt. The cache may hold its first half.

        Returns:
            One entry per scheduler. ``scores``: log-probs. ``cached``: tokens whose keys and values came from the
            cache. ``version``: of the weights. Empty from an engine that makes only a part of a response (prefill,
            decode).
        """
        if self._spec.worker_type is not WorkerType.REGULAR:
            return []
        if num_schedulers == 1:
            return [self._score(token_ids, {})]
        with ThreadPoolExecutor(num_schedulers) as pool:
            return list(pool.map(lambda rank: self._score(token_ids, {"routed_dp_rank": rank}), range(num_schedulers)))

    def _score(self, token_ids: Sequence[int], target: Mapping[str, int]) -> dict[str, Any]:
        # scores from the first token on would keep SGLang from using its cache, and hide a cache that is stale
        half = len(token_ids) // 2
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0},  # a sampled token would change the random numbers of others
            "return_logprob": True,
            "logprob_start_len": len(token_ids) - half - 1,
            **target,
        }
        info = self.generate(body)[0]["meta_info"]
        scores = [float(entry[0]) for entry in info["input_token_logprobs"][-half:]]
        return {"scores": scores, "cached": int(info["cached_tokens"]), "version": str(info["weight_version"])}

    def _log_probs(self, token_ids: Sequence[int], requests: Sequence[Mapping[str, str]]) -> list[list[float]]:
        """Log-probs of ``token_ids`` from the second on, one list for the fields of each of ``requests``."""
        body = {
            "input_ids": [list(token_ids)] * len(requests),  # SGLang computes them in one pass
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            **{name: [fields.get(name) for fields in requests] for name in requests[-1]},
        }
        answers = [answer["meta_info"] for answer in self.generate(body)]
        return [[float(entry[0]) for entry in answer["input_token_logprobs"][1:]] for answer in answers]
