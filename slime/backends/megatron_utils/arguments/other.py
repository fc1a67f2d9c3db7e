"""Every other option of Megatron: known by name and shape, so that a launch script that uses one gets a clear word.

Two sources: the fields of megatron-core's dataclasses (``core_options.json``, written by
``tools/make_megatron_options.py`` and kept current by a test), and the names that exist only in Megatron-LM's own
parser (``_LAUNCHER``). Called once by the command line with what all rooms have declared. Standard library only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from slime.config.groups import flags_of

_NOT_READ = "this trainer does not have that part of Megatron"
_TYPES: dict[str, Any] = {
    "int": int | None,
    "float": float | None,
    "str": str | None,
    "ints": list[int] | None,
    "strs": list[str] | None,
    "switch": bool,
    "off": bool,
}

_LAUNCHER: dict[str, str] = {
    "int": """
        adlr-autoresume-interval batch-size biencoder-projection-dim check-weight-hash-across-dp-replicas-interval
        ddp-bucket-size ddp-num-buckets decoder-num-layers dino-bottleneck-size dino-freeze-last-layer
        dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-warmup-teacher-temp-epochs
        distributed-timeout-seconds-after-init empty-unused-memory-level encoder-num-layers encoder-seq-length
        error-injection-rate eval-iters exit-duration-in-mins exit-interval grpo-group-size grpo-iterations
        grpo-prompts-per-step ict-head-size img-h img-w indexer-batch-size indexer-log-interval
        inference-batch-times-seqlen-threshold inference-dynamic-batching-block-size
        inference-dynamic-batching-chunk-size inference-dynamic-batching-cuda-graph-max-tokens
        inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens-override
        inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-unified-memory-level
        inference-logging-step-interval inference-max-batch-size inference-max-requests inference-max-seq-length
        inprocess-active-world-size inprocess-max-iterations iter-per-epoch kitchen-recipe-number local-rank
        logging-level lr-decay-samples lr-warmup-samples lr-wsd-decay-samples mask-factor max-tokens-to-oom
        moe-upcycling-granularity non-persistent-save-interval num-channels num-classes num-dataset-builder-threads
        num-workers patch-dim profile-step-end profile-step-start relative-attention-max-distance
        relative-attention-num-buckets replication-factor replication-jump retriever-seq-length
        retro-cyclic-train-iters retro-encoder-layers retro-num-neighbors retro-num-retrieved-chunks
        rl-prompts-per-eval rl-sequence-packing-bin-size rotary-seq-len-interpolation-factor save-retain-interval
        straggler-ctrlr-port straggler-minmax-count tensorboard-log-interval tiktoken-num-special-tokens
        train-samples train-sync-interval vocab-extra-ids warmup
    """,
    "float": """
        classes-fraction data-per-class-fraction decoupled-lr decoupled-min-lr dino-teacher-temp
        dino-warmup-teacher-temp fim-rate fim-spm-rate grpo-clamp-eps-lower grpo-clamp-eps-upper
        grpo-default-temperature grpo-default-top-p grpo-entropy-term-weight grpo-kl-beta head-lr-mult
        hybrid-attention-ratio hybrid-mlp-ratio hysteresis inference-dynamic-batching-buffer-guaranteed-fraction
        inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
        initial-loss-scale inprocess-barrier-timeout inprocess-completion-timeout inprocess-hard-timeout
        inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
        inprocess-monitor-process-interval inprocess-monitor-thread-interval inprocess-progress-watchdog-interval
        inprocess-soft-timeout inprocess-termination-grace-time loss-scale loss-scale-window mask-prob
        mid-level-dataset-surplus min-loss-scale query-in-block-prob retro-attention-gate
        retro-encoder-attention-dropout retro-encoder-hidden-dropout rl-importance-sampling-truncation-coef
        sample-rate short-seq-prob
    """,
    "str": """
        app-tag-run-name app-tag-run-version bert-embedder-type bert-load block-data-path ckpt-convert-format
        ckpt-convert-save data-args-path data-cache-path dataloader-type dist-ckpt-format dist-ckpt-strictness
        embedding-path error-injection-type evidence-data-path exp-avg-dtype exp-avg-sq-dtype
        heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path hybrid-override-pattern ict-load
        inprocess-granularity kitchen-config-file langrl-env-config langrl-external-server
        langrl-inference-server-conversation-template langrl-inference-server-type load-model-opt-format
        main-grads-dtype main-params-dtype mask-type memory-snapshot-path merge-file nccl-communicator-config-path
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
        non-persistent-local-ckpt-dir object-storage-cache-path one-logger-project one-logger-run-name
        per-dataset-sequences-path per-split-data-args-path pipeline-model-parallel-layout rerun-mode
        result-rejected-tracker-filename retro-project-dir rl-sequence-packing-algo sft-tokenizer-prompt-format
        sharp-enabled-group split swin-backbone-type te-precision-config-file tensorboard-dir tiktoken-pattern
        timing-log-option titles-data-path tokenizer-metadata tp-comm-overlap-cfg vision-backbone-type
        vision-pretraining-type vocab-file wandb-entity wandb-exp-name wandb-save-dir yaml-cfg
    """,
    "ints": """
        iterations-to-skip no-rope-freq profile-ranks retriever-report-topk-accuracies window-size
    """,
    "strs": """
        cp-comm-type cuda-graph-scope data-path high-priority-stream-groups linear-attention-freq test-data-path
        tiktoken-special-tokens tokenizer-special-tokens train-data-path valid-data-path window-attn-skip-freq
    """,
    "switch": """
        adlr-autoresume allow-ambiguous-pad-tokens async-ckpt-use-cached-structure auto-detect-ckpt-format
        bert-no-binary-head biencoder-shared-query-context-model calc-ft-timeouts check-for-large-grads
        check-for-spiky-loss checkpoint-activations ckpt-convert-update-legacy-dist-opt-format
        ckpt-fully-parallel-save create-all-gather-group dataloader-defer-npy-index-mmap dataloader-fast-cache-load
        ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
        decode-only-cuda-graphs decrease-batch-size-if-needed dino-norm-last-layer disable-chunked-prefill
        disable-msc disable-straggler-on-startup disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient enable-ft-package enable-msc
        eod-mask-loss exit-on-missing-checkpoint exit-signal-handler fake-process-group fim-data full-validation
        grad-reduce-in-bf16 grpo-filter-groups-with-same-reward inference-dynamic-batching
        init-method-xavier-uniform inprocess-empty-cuda-cache inprocess-restart lazy-mpu-init
        load-main-params-from-ckpt log-batch-size-to-tensorboard log-device-memory-used log-energy
        log-memory-to-tensorboard log-params-norm log-straggler log-timers-to-tensorboard
        log-validation-ppl-to-tensorboard log-world-size-to-tensorboard mock-data multiple-validation-sets
        nccl-all-reduce-for-prefill no-async-tensor-model-parallel-allreduce no-clone-scatter-output-in-embedding
        no-create-attention-mask-in-dataloader no-data-sharding no-fp8-wgrad no-gradient-reduce-div-fusion
        no-log-learning-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-manual-gc-eval no-mmap-bin-files
        no-one-logger no-pin-cpu-grads no-pin-cpu-params no-query-key-layer-scaling
        no-scatter-gather-tensors-in-pipeline no-strict-fsdp-dtensor-load
        no-use-tokenizer-model-from-checkpoint-args one-logger-async onnx-safe openai-gelu output-bert-embeddings
        perform-rl-step profile quick-geglu record-memory-history replication reset-attention-mask
        reset-position-ids retriever-score-scaling retro-add-retriever retro-no-verify-neighbor-count
        rl-calculate-intra-group-similarity rl-inference-logprobs-is-correction rl-offload-kv-cache-during-training
        rl-offload-optimizer-during-inference rl-partial-rollouts rl-remove-kv-cache-during-training
        rl-reset-cuda-graphs rl-use-sequence-packing run-workload-inspector-server save-tokenizer-assets sft
        skip-train squared-relu standalone-embedding-stage strict-fsdp-dtensor-load
        tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy
        torch-fsdp2-no-reshard-after-forward use-checkpoint-args use-dist-ckpt use-legacy-models
        use-legacy-static-engine use-mcore-models use-mp-args-from-checkpoint-args use-nccl-ub use-one-sent-docs
        use-pytorch-profiler use-ring-exchange-p2p use-sharp use-torch-fsdp2 vision-pretraining
    """,
}
"""Options of Megatron-LM's launcher without a field in megatron-core, by what follows them on a command line."""

_HARMLESS = """
        async-ckpt-use-cached-structure create-all-gather-group dataloader-type
        ddp-average-in-collective ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
        delay-wgrad-compute disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag
        disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs empty-unused-memory-level
        eval-iters high-priority-stream-groups log-batch-size-to-tensorboard log-device-memory-used
        log-memory-to-tensorboard log-timers-to-tensorboard log-world-size-to-tensorboard
        no-async-tensor-model-parallel-allreduce no-log-learning-rate-to-tensorboard
        no-log-loss-scale-to-tensorboard no-manual-gc-eval no-one-logger no-pin-cpu-grads no-pin-cpu-params
        no-scatter-gather-tensors-in-pipeline num-dataset-builder-threads num-workers
        overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step split
        tensorboard-log-interval timing-log-option tp-comm-bootstrap-backend tp-comm-overlap-rs-dgrad
        use-mcore-models use-nccl-ub use-sharp
"""
"""Options about kernels, overlap, logging and data loaders of Megatron: scripts pass them, and no number changes."""


def core_options() -> Iterator[dict[str, Any]]:
    """The options that megatron-core's dataclasses imply: ``flags``, ``dest``, ``kind``, ``default``."""
    path = Path(__file__).with_name("core_options.json")
    yield from json.loads(path.read_text(encoding="utf-8"))["options"]


def launcher_options() -> Iterator[dict[str, Any]]:
    """The options that exist only in Megatron-LM, in the same form; their default is "not given"."""
    for kind, names in _LAUNCHER.items():
        for name in names.split():
            yield {
                "flags": [f"--{name}"],
                "dest": name.replace("-", "_"),
                "kind": kind,
                "default": False if kind == "switch" else None,
            }


def other_flags(groups: Iterable[type]) -> type:
    """A group with every option of Megatron that none of ``groups`` declares. Hidden in ``--help``.

    Using one is "not supported yet", unless it could not change a number; its default changes nothing and is allowed.
    """
    dests: set[str] = set()
    spellings: set[str] = set()
    for declared in flags_of(list(groups)):
        dests.add(declared.name)
        spellings.update(declared.spellings)
        spellings.add("--no-" + declared.spellings[0].removeprefix("--"))
    fields = []
    for option in (*core_options(), *launcher_options()):
        free = [spelling for spelling in option["flags"] if spelling not in spellings]
        if not free or option["dest"] in dests:
            continue
        dests.add(option["dest"])
        spellings.update(free)
        fields.append((option["dest"], _TYPES[option["kind"]], _field(option, free)))
    return make_dataclass("OtherMegatronArgs", fields, repr=False, eq=False, namespace={"__doc__": "Megatron, other."})


def _field(option: dict[str, Any], spellings: list[str]) -> Any:
    default = option["default"]
    metadata: dict[str, Any] = {"help": argparse.SUPPRESS, "off": spellings[0], "flags": tuple(spellings[1:])}
    if spellings[0].removeprefix("--") in _HARMLESS.split():
        metadata["no_effect"] = "it is about parts of Megatron that do not run here"
    else:
        metadata["later"] = _NOT_READ
    return field(default=default, metadata=metadata)
