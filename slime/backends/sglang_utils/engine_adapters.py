"""The calls of an engine that serves a LoRA adapter beside its weights."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class AdapterCalls(ABC):
    """Part of :class:`slime.backends.sglang_utils.engine.SGLangEngine`."""

    @abstractmethod
    def _change(
        self,
        verb: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None = None,
        *,
        is_checked: bool = True,
        needs: str | None = None,
    ) -> dict[str, Any]:
        """POST, with the deadline of weight syncs."""

    @abstractmethod
    def _request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ...,
        *,
        is_checked: bool = True,
        needs: str | None = None,
    ) -> dict[str, Any]:
        """One HTTP call."""

    def adapters(self) -> list[str]:
        """The names of the adapters that requests may name."""
        models = self._request("GET", "/v1/models", needs="data")["data"]
        return [str(model["id"]) for model in models if model.get("parent") is not None]

    def load_adapter_tensors(
        self, name: str, tensors: bytes, config: Mapping[str, Any], checksums: Mapping[str, str], num_ranks: int
    ) -> None:
        """Replace the adapter ``name`` on the ``num_ranks`` ranks of the engine.

        Args:
            tensors: pickle of ``{"metadata": ..., "flattened_tensor": ...}``.
            config: content of adapter_config.json.
            checksums: SHA-256 of each tensor. Every rank compares them.
        """
        text = base64.b64encode(tensors).decode("ascii")
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            # every rank reads only the payload of its number
            "serialized_named_tensors": [text] * num_ranks,
            "load_format": "flattened_bucket",
            "expected_checksums": dict(checksums),
        }
        self._unload_adapter(name)
        self._change("load_lora_adapter_from_tensors", body)

    def load_adapter_files(self, name: str, path: str) -> None:
        """Replace the adapter ``name`` by that in the directory ``path``."""
        self._unload_adapter(name)
        self._change("load_lora_adapter", {"lora_name": name, "lora_path": path})

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
        return {
            "adapters": adapters,
            "adapted": self._log_probs(token_ids, fields) if is_loaded else None,
            "base": self._log_probs(token_ids, {}),
        }

    def _log_probs(self, token_ids: Sequence[int], fields: Mapping[str, str]) -> list[float]:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            **fields,
        }
        meta = self._change("generate", body, needs="meta_info")["meta_info"]
        return [float(entry[0]) for entry in meta["input_token_logprobs"][1:]]
