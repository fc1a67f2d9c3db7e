"""Checks of ``slime doctor engine`` on the verbs by which a run controls an engine.

A verb may answer "success" and do nothing, so every check looks at the effect: log-probs, checksums, tokens from the
cache, running requests. New weights come from slime's own senders. At the end the engine has the checkpoint's weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime.backends import EVERY_RANK, AdapterProof, Canary, EngineInfo, NamedTensor, Probe, Recipients
from slime.backends.sglang_utils.checksum import SGLangTensors
from slime.backends.sglang_utils.engine import MEMORY_TAGS, SGLangEngine
from slime.backends.sglang_utils.external import engine_info
from slime.data.engine_fields import ADAPTER_NAME
from slime.doctor import Finding, fail, ok, skip, warn
from slime.doctor.engine_answers import Answer, Trial
from slime.doctor.engine_golden import FACTOR, Golden
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig
from slime.utils import accelerator
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import ConfigError, SlimeError, undone
from slime.utils.net import get_current_node_ip
from slime.weight_sync.probe import probe_ids, verify_adapter, verify_canary
from slime.weight_sync.root_hash import RootProof, places_of
from slime.weight_sync.send_adapter import AdapterUpdater
from slime.weight_sync.send_disk import DiskSettings
from slime.weight_sync.session import ALONE, WeightUpdate, load_files
from slime.weight_sync.updater import WeightUpdater

_TIMEOUT_S = 600.0
# A paused engine must not answer for this long. An engine that ignores the pause needs some milliseconds.
_PAUSED_S = 1.0
_LONG = 100  # tokens of a response that is interrupted
# A fast engine, or a busy host, may finish a response before this process sees or interrupts it.
_TRIES = 10
ADAPTER = LoraConfig(rank=8, alpha=16.0)


@dataclass
class LocalCalls:
    """Calls to engines, from threads of this process."""

    futures: list[Future[Any]]

    def wait(self, timeout_s: float) -> list[Any]:
        return [future.result(timeout_s) for future in self.futures]


class LocalFleet:
    """Engines of this process with the EngineFleet protocol: the weight sync needs no Ray."""

    def __init__(self, handles: Sequence[SGLangEngine], engines: Sequence[EngineInfo] | None = None) -> None:
        self.handles = handles
        self.engines = engines or [EngineInfo(handle.url, 1) for handle in handles]
        self.pool = ThreadPoolExecutor(4)

    def only(self, indices: Sequence[int]) -> LocalFleet:
        return LocalFleet([self.handles[i] for i in indices], [self.engines[i] for i in indices])

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> LocalCalls:
        own = each or [{}] * len(self.handles)
        calls = [
            self.pool.submit(getattr(handle, verb), **kwargs, **extra)
            for handle, extra in zip(self.handles, own, strict=True)
        ]
        return LocalCalls(calls)


def health(trial: Trial) -> Iterator[Finding]:
    """The questions of the watch: is it there, does it work, how many requests does it have?"""
    engine = trial.engine
    states = {"health": engine.health(), "is_responsive": engine.is_responsive(_TIMEOUT_S)}
    wrong = [name for name, is_right in states.items() if not is_right]
    if wrong:
        yield fail("health", f"{', '.join(wrong)}: false for an engine that answers", "the watch would restart it")
    else:
        yield ok("health", "it answers, and its scheduler works")
    with ThreadPoolExecutor(1) as pool:
        for _ in range(_TRIES):
            running = _long_request(trial, pool)
            seen = _sees_request(trial, running)
            running.result(_TIMEOUT_S)
            if seen:
                break
    left = engine.num_requests()
    value = f"{'1' if seen else 'never 1'} while a request runs, {left} afterwards"
    is_right = seen and left == 0
    yield ok("load", value) if is_right else fail("load", value, "/v1/loads must count running and waiting requests")


def _long_request(trial: Trial, pool: ThreadPoolExecutor) -> Future[Answer]:
    prompt = min(trial.golden.prompts, key=len)
    room = trial.golden.context - len(prompt) - 1
    return pool.submit(lambda: trial.ask([prompt], max_new_tokens=min(_LONG, room), temperature=1.0)[0])


def _sees_request(trial: Trial, running: Future[Answer]) -> bool:
    """Whether the scheduler reports a request while ``running`` is one."""
    seen = [0]

    def ends() -> bool:
        seen[0] = seen[0] or trial.engine.num_requests()
        return bool(seen[0]) or running.done()

    wait_until(ends, Deadline(_TIMEOUT_S, "a request to run"), poll_s=0.001)
    return bool(seen[0])


def interruptions(trial: Trial) -> Iterator[Finding]:
    """Abort, pause in both modes, continue."""
    engine = trial.engine
    yield _ends_early(trial, "abort", engine.abort_all, lambda: None)
    yield _ends_early(trial, "pause (abort)", lambda: engine.pause_generation("abort"), engine.continue_generation)
    with ThreadPoolExecutor(1) as pool:
        engine.pause_generation("retract")
        try:
            waiting = pool.submit(trial.ask, [trial.golden.prompts[0]], max_new_tokens=1)
            is_answered = _is_done(waiting, _PAUSED_S)
        finally:
            engine.continue_generation()
        what, fix = "pause (retract)", "a paused engine must not generate: tokens of two versions would mix"
        yield fail(what, "a request was answered", fix) if is_answered else ok(what, "a new request waits")
        is_late = not _is_done(waiting, _TIMEOUT_S)
        what = "continue"
        yield fail(what, "the request still waits", "look into its log") if is_late else ok(what, "it is answered")


def _is_done(future: Future[Any], seconds: float) -> bool:
    try:
        future.result(seconds)
    except TimeoutError:
        return False
    return True


def _ends_early(trial: Trial, what: str, stop: Callable[[], None], after: Callable[[], None]) -> Finding:
    """A running request ends with the tokens that it has."""
    was_running = False
    for _ in range(_TRIES):
        with ThreadPoolExecutor(1) as pool:
            running = _long_request(trial, pool)
            was_running |= _sees_request(trial, running)
            stop()
            try:
                answer = running.result(_TIMEOUT_S)
            finally:
                after()
        value = f"{len(answer.ids)} tokens, reason {dict(answer.finish)}"
        if answer.finish.get("type") == "abort":
            differences = torch.zeros(1)
            if answer.ids:
                differences = answer.log_probs - trial.golden.log_probs(answer.tokens, len(answer.prompt))
            return ok(what, value) if trial.agrees(differences) else fail(what, value, "its log-probs are wrong")
    fix = "running requests must end with the reason abort" if was_running else "the request was done before the call"
    return fail(what, value, fix)


def flushed_cache(trial: Trial) -> Iterator[Finding]:
    """``flush_cache`` forgets prefixes."""
    what, prompt = "flush_cache", max(trial.golden.prompts, key=len)
    cached = [int(trial.ask([prompt], max_new_tokens=1)[0].meta["cached_tokens"]) for _ in range(2)]
    if not cached[1]:
        yield skip(what, "the engine caches no prefix")
        return
    trial.engine.flush_cache()
    left = int(trial.ask([prompt], max_new_tokens=1)[0].meta["cached_tokens"])
    value = f"{cached[1]} tokens from the cache before, {left} after"
    yield fail(what, value, "requests go on from keys of older weights") if left else ok(what, value)


class _Sync:
    """Weight updates of an engine by slime's senders, and their proofs."""

    def __init__(self, trial: Trial) -> None:
        golden = trial.golden
        self.golden, self.engine = golden, trial.engine
        size = int(trial.server.get("tp_size") or 1) * int(trial.server.get("pp_size") or 1)
        self.info = engine_info(self.engine.url, size, None, trial.server)
        self.ids = probe_ids(golden.vocab_size)
        self.number = 0
        self.tolerance = golden.precision.median
        self.before: Canary | None = None

    def fleet(self, first_slot: int | None = None) -> LocalFleet:
        return LocalFleet([self.engine], [replace(self.info, first_slot=first_slot)])

    def canary(self) -> Canary:
        scores = self.golden.log_probs(self.ids)[-(len(self.ids) // 2) :].tolist()
        return Canary(str(self.number), self.ids, scores, self.tolerance)

    def run(self, what: str, factor: float, send: Callable[[WeightUpdate], object]) -> Finding:
        """Send the weights times ``factor`` and look whether the engine computes with them."""
        self.before = self.canary()
        # so that the cache holds what a flush must drop
        for _ in range(2):
            self.engine.canary(self.ids)
        self.golden.scale(factor)
        self.number += 1
        update = WeightUpdate(str(self.number), max_chunk_bytes=None, timeout_s=_TIMEOUT_S)
        try:
            send(update)
            verify_canary(self.fleet(), self.canary(), _TIMEOUT_S, self.before)
        except SlimeError as error:
            return fail(what, str(error), "a run would train on samples of other weights")
        except TimeoutError:
            return fail(what, f"no answer within {_TIMEOUT_S:g} s", "look into the engine's log")
        return ok(what, f"the engine computes with version {self.number}")


def weight_updates(trial: Trial) -> Iterator[Finding]:
    """Each transport, checksums, and released memory. Ends with the checkpoint's weights, also after an error."""
    if trial.server.get("quantization") or int(trial.server.get("pp_size") or 1) > 1:
        yield skip("weight updates", "a quantized engine, or one with pipeline stages")
        return
    sync = _Sync(trial)

    def restore() -> None:
        sync.golden.scale(1.0)
        sync.engine.update_weights_from_disk(sync.golden.checkpoint, str(sync.number + 1), flush_cache=True)

    with undone(restore):  # the engine may be someone else's
        yield from _updates(trial, sync)


def _updates(trial: Trial, sync: _Sync) -> Iterator[Finding]:
    engine, golden = trial.engine, trial.golden
    first = engine.rank_checksums()
    yield _by_network(sync, "from distributed", FACTOR)
    changed = engine.rank_checksums()
    yield _checksums(first, changed)
    if trial.shares_memory and sync.info.num_gpus == 1:
        yield _by_network(sync, "from tensor", 1.0, first_slot=0)
        yield _by_network(sync, "from tensor, again", FACTOR, first_slot=0)
    else:
        yield skip("from tensor", "needs an engine of one rank on this host (--shares-memory)")
    yield _root_hash(sync)
    yield from _memory(trial, sync)
    engine.reset_weights()
    (answer,) = trial.ask([golden.prompts[0]], fields={"logprob_start_len": 0}, max_new_tokens=0)
    is_same = trial.agrees(answer.prompt_log_probs - golden.log_probs(golden.prompts[0]))
    what, fix = "reset_weights", "the check at the start of a run (--check-weight-update-equal) finds nothing"
    yield fail(what, "the log-probs are still the same", fix) if is_same else ok(what, "the log-probs change")
    files = golden.checkpoint
    yield sync.run("from disk", 1.0, lambda update: load_files(sync.fleet(), files, update))
    yield _restored(first, changed, engine.rank_checksums())


def _restored(first: Sequence[Any], changed: Sequence[Any], last: Sequence[Any]) -> Finding:
    """The checksums of the start. Buffers, which did not change with the weights, are not in any update."""
    what, differing = "restored", _names(first, last, are_equal=False)
    if not differing:
        return ok(what, "the checksums are those of the start")
    value = f"{len(differing)} tensors differ from those of the start, the first is {differing[0]}"
    if set(differing) <= set(_names(first, changed, are_equal=True)):
        # Seen in SGLang 0.5.23 with multimodal positions: its reset overwrites a buffer that is not stored.
        return warn(what, value, "reset_weights overwrites buffers that no checkpoint has: --check-weight-update-equal")
    return fail(what, value, "an update left some tensor behind, or the engine rearranges it once more")


def _by_network(sync: _Sync, what: str, factor: float, first_slot: int | None = None) -> Finding:
    is_near = first_slot is not None
    is_local = sync.engine.url.startswith(("http://127.", "http://localhost"))
    # an engine on another host must reach the group of the sender
    address = "127.0.0.1" if is_local else get_current_node_ip()
    updater = WeightUpdater(ALONE, address=address, shares_devices=is_near, timeout_s=_TIMEOUT_S)
    try:
        return sync.run(what, factor, lambda update: updater.update(sync.fleet(first_slot), sync.golden, update))
    finally:
        updater.disconnect()


def _checksums(first: Sequence[Any], changed: Sequence[Any]) -> Finding:
    count, same = sum(len(held) for _, held in first), _names(first, changed, are_equal=True)
    value = f"{count - len(same)} of {count} tensors changed with the weights"
    # buffers that no checkpoint holds stay the same
    return ok("checksums", value) if len(same) < count / 2 else fail("checksums", value, f"the same: {same[:3]}")


def _names(first: Sequence[Any], second: Sequence[Any], *, are_equal: bool) -> list[str]:
    """The tensors of all ranks whose checksums are equal, or are not."""
    pairs = zip(first, second, strict=True)
    return [name for (_, a), (_, b) in pairs for name in a if (a[name] == b.get(name)) is are_equal]


def _root_hash(sync: _Sync) -> Finding:
    """slime's rules of the engine's layout: checksums of both sides."""
    what = "root hash"
    try:
        shape = read_shape(sync.golden.checkpoint)
    except ConfigError:
        return skip(what, "slime does not know the family")
    proof = RootProof(SGLangTensors.of(shape, on_cpu=accelerator.current().is_cpu), excuses="none")
    root = proof.begin(places_of([sync.info], (), 0))
    for _ in root.watch(sync.golden.export_weights()):
        pass
    try:
        proof.verify(sync.fleet(), str(sync.number), root.checksums(), _TIMEOUT_S)
    except SlimeError as error:
        return fail(what, str(error), "adapt slime/backends/sglang_utils/checksum.py, or --weight-sync-proof canary")
    return ok(what, f"{proof.root[:16]} of {len(proof.compared(places_of([sync.info], (), 0)[0]))} tensors per rank")


def _memory(trial: Trial, sync: _Sync) -> Iterator[Finding]:
    """Release and take memory again. Released weights are lost."""
    what, engine = "release and resume", trial.engine
    if not trial.server.get("enable_memory_saver"):
        yield skip(what, "start the engine with --enable-memory-saver")
        return
    before = engine.rank_checksums()
    engine.flush_cache()
    engine.release_memory_occupation()
    # checksums need the weights alone, and a GPU engine may not touch memory that it has released
    engine.resume_memory_occupation(("weights", "cuda_graph"))
    after = engine.rank_checksums()
    engine.resume_memory_occupation(MEMORY_TAGS)
    if trial.server.get("enable_weights_cpu_backup"):
        is_right, value = before == after, "the weights come back from their copy"
    else:
        is_right, value = before != after, "the weights are released"
    yield ok(what, value) if is_right else fail(what, "the weights are not as after a release", "no memory is freed")
    yield _by_network(sync, "update after resume", sync.golden.factor)


def adapters(trial: Trial) -> Iterator[Finding]:
    """An adapter from memory and from files, a second version of it, and a request without it."""
    if not trial.server.get("enable_lora"):
        yield skip("adapters", "start the engine with --enable-lora (a dense model without images gets it)")
        return
    names = ADAPTER.module_names(read_shape(trial.golden.checkpoint))
    before: Probe | None = None
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as folder:
        for number, (what, files) in enumerate((("adapter from tensors", None), ("adapter from disk", Path(folder)))):
            holder = _Adapted(trial.golden, number, trial.golden.adapter(ADAPTER, names, seed=number))
            base = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=False, timeout_s=_TIMEOUT_S)
            settings = None if files is None else DiskSettings(files)
            updater = AdapterUpdater(ALONE, ADAPTER, base, lambda trainer, path: None, settings)
            fleet, probe = _Sync(trial).fleet(), holder.probe()
            update = WeightUpdate(probe.version, max_chunk_bytes=None, timeout_s=_TIMEOUT_S)
            try:
                updater.update(fleet, holder, update)
                verify_adapter(fleet, AdapterProof(probe, {"lora_path": ADAPTER_NAME}), _TIMEOUT_S, before)
                yield ok(what, f"requests with and without it agree with transformers, version {probe.version}")
            except SlimeError as error:
                yield fail(what, str(error), "samples would come from another adapter, or from the base")
            finally:
                updater.disconnect()
            before = probe


class _Adapted:
    """A trainer (``WeightExporter``) of the checkpoint with an adapter."""

    is_weight_source = True

    def __init__(self, golden: Golden, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._golden = golden
        self._version = str(number)
        self._tensors = tensors
        self.export_weights = golden.export_weights
        self.save_hf = golden.save_hf

    def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self._tensors.items()

    def probe(self) -> Probe:
        ids = probe_ids(self._golden.vocab_size)
        base = self._golden.log_probs(ids).tolist()
        self._golden.merge(self._tensors, ADAPTER.scale)
        adapted = self._golden.log_probs(ids).tolist()
        self._golden.merge(self._tensors, -ADAPTER.scale)
        return Probe(self._version, ids, adapted, base)


VERBS = {
    "control": (health, interruptions, flushed_cache),
    "weights": (weight_updates,),
    "adapters": (adapters,),
}
"""Section -> its checks."""
