"""Rules and derivations that need more than one room: the trainer of each backend and role, engines, this machine.

Used by ``slime.ray.arguments`` after the flags are resolved.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import resource
import socket
import string
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slime.backends.fsdp_utils import arguments as fsdp_rules
from slime.backends.megatron_utils import argument_rules as megatron_rules
from slime.backends.megatron_utils.model_rules import check_against_hf
from slime.backends.megatron_utils.optimizer_rules import int4, kv_fp8
from slime.backends.sglang_utils.topology import topology_of
from slime.backends.training.rules import check_adapters, check_checkpoints, check_export
from slime.config import groups
from slime.config.check import NUMBER_RULES, paths
from slime.config.groups import flag_of
from slime.config.plan.devices import colocation_problems, gpu_bytes, is_judged
from slime.config.roles import check_roles, read_roles, role_args
from slime.hooks import check_hooks
from slime.models.family import families, is_family_spec, is_vision_spec
from slime.models.hf_shape import read_shape
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils import accelerator
from slime.utils.errors import ConfigError

# Linux's default limit per process. With two engines of a tiny model one process has had 173 files open.
_MIN_OPEN_FILES = 1024
_CONNECT_TIMEOUT_S = 2.0
_WRITTEN = ("output_dir", "save", "save_hf", "save_debug_rollout_data", "save_debug_train_data")


# ---- trainer


def _backend(args: Namespace) -> Iterator[str]:
    if args.train_backend == "megatron":
        rules = megatron_rules.RULES
    elif args.debug_rollout_only:
        return
    else:
        rules = (*fsdp_rules.RULES, *megatron_rules.TRAINING_RULES)
    for rule in rules:
        yield from rule(args)


def _balance(args: Namespace) -> Iterator[str]:
    """Balancing by compute needs the model's sizes, which are known for the families of the Megatron backend only."""
    if args.train_backend == "megatron" or args.hf_checkpoint is None:
        return
    for name in ("balance_data", "balance_by_flops"):
        if vars(args)[name] and not _is_known(args.hf_checkpoint):
            yield f"{flag_of(name)} does not know how much this model of --hf-checkpoint {args.hf_checkpoint} computes."


def _shared_prefixes(args: Namespace) -> Iterator[str]:
    """Parts that read the tokens of a micro-batch as separate sequences."""
    if not args.share_prefixes or args.debug_rollout_only:
        return
    parts = {
        f"--context-parallel-size {args.context_parallel_size} cuts every sequence into equal pieces": (
            args.context_parallel_size > 1
        ),
        "--loss-type custom_loss reads the logits of all rows sample by sample": args.loss_type == "custom_loss",
        "--enable-mtp-training predicts along whole sequences": args.enable_mtp_training,
        f"--attention-dropout {args.attention_dropout} differs from sample to sample": args.attention_dropout > 0,
        f"--hidden-dropout {args.hidden_dropout} differs from sample to sample": args.hidden_dropout > 0,
        f"--lora-dropout {args.lora_dropout} differs from sample to sample": args.lora_dropout > 0,
        f"--attn-implementation {args.attn_implementation} sees no keys of other samples": bool(
            args.attn_implementation
        ),
        "--custom-model-provider-path has an attention that is not known": bool(args.custom_model_provider_path),
        f"--spec {' '.join(args.spec or ())} has an attention that is not known": _has_users_layers(args),
        **_special_attention(args),
    }
    for part, is_given in parts.items():
        if is_given:
            yield f"--share-prefixes is not supported yet: {part}. Drop one of them."
    if args.multimodal_keys:
        groups.warn(args, "--share-prefixes", "no effect on batches with images")
    if args.micro_batch_size == 1 and not args.use_dynamic_batch_size:
        groups.warn(args, "--share-prefixes", "no effect on micro-batches of one sample: --use-dynamic-batch-size")


def _has_users_layers(args: Namespace) -> bool:
    return bool(args.spec) and not is_family_spec(args.spec[0]) and not is_vision_spec(args.spec[0])


def _special_attention(args: Namespace) -> dict[str, bool]:
    if args.hf_checkpoint is None or not _is_known(args.hf_checkpoint):
        return {}
    shape, where = read_shape(args.hf_checkpoint), f"--hf-checkpoint {args.hf_checkpoint}"
    return {
        f"{where} has linear attention, which carries a state along each sequence": shape.delta_net is not None,
        f"{where} has sparse attention, which chooses keys from one sequence": shape.sparse is not None,
    }


def _is_known(hf_checkpoint: str) -> bool:
    try:
        read_shape(hf_checkpoint)
    except ConfigError:
        return False
    return True


def _converter(args: Namespace) -> Iterator[str]:
    """``--model-name`` may name the converter of the checkpoint's family, and no other."""
    if args.model_name is None or args.hf_checkpoint is None or not _is_known(args.hf_checkpoint):
        return
    family = read_shape(args.hf_checkpoint).family.model_type
    named = _family_named(args.model_name)
    if named != family:
        found = f"names the converter of {named}" if named else f"names none of {', '.join(sorted(families()))}"
        yield (
            f"--model-name {args.model_name} {found}, but --hf-checkpoint {args.hf_checkpoint} holds a model of type "
            f"{family}: leave it out."
        )


def _family_named(name: str) -> str | None:
    """The family in ``qwen3moeconfig``, ``Qwen3-MoE`` or ``qwen3_moe``."""
    wanted = _plain(name)
    inside = [family for family in families() if _plain(family) in wanted]
    around = [family for family in families() if wanted and wanted in _plain(family)]
    # the longest type inside the name: qwen3moe also contains qwen3
    return max(inside, key=len, default=None) or min(around, key=len, default=None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def other_model_flags(args: Namespace) -> None:
    """Report model flags that FSDP does not read: it builds the model of config.json."""
    if args.train_backend == "megatron":
        if args.attn_implementation is not None:
            flag = f"--attn-implementation {args.attn_implementation}"
            groups.warn(args, flag, "no effect: only --train-backend fsdp reads it")
        return
    if args.hf_checkpoint is None or not _is_known(args.hf_checkpoint):
        return  # another rule requires the flag, and a model that only transformers knows has no shape to compare
    for problem in check_against_hf(args):
        flag, _, rest = problem.partition(" ")
        groups.warn(args, flag, f"{rest} It is ignored: --train-backend fsdp builds the model of config.json.")


def _fake_quantization(args: Namespace) -> Iterator[str]:
    if not args.debug_rollout_only and args.hf_checkpoint is not None:  # the offline tools do not train
        yield from int4(args)
        yield from kv_fp8(args)


TRAINER_RULES = (_backend, _balance, _shared_prefixes, _converter, _fake_quantization)
MODEL_RULES = (*TRAINER_RULES, check_checkpoints, check_export)


# ---- roles: the trainer's rules once more, for the arguments that --megatron-config-path gives each role

_RULES_PER_ROLE = (*NUMBER_RULES, *paths.OVERLAP_RULES, *MODEL_RULES)


def _roles(args: Namespace) -> Iterator[str]:
    return _new_problems(args, lambda view: [problem for rule in _RULES_PER_ROLE for problem in rule(view)])


def _role_hooks(args: Namespace) -> Iterator[str]:
    return _new_problems(args, check_hooks)


def _new_problems(args: Namespace, find: Callable[[Namespace], list[str]]) -> Iterator[str]:
    """Problems of a role that the command line itself does not have."""
    path = args.megatron_config_path
    if path is None or args.debug_rollout_only:
        return
    same = copy.deepcopy(args)  # rules add notices, and the command line has those already
    try:
        entries = read_roles(path).values()
        if list(check_roles(same)):
            return
    except ConfigError:
        return
    known = set(find(same))
    for entry in entries:
        if entry.role == "critic" and not args.use_critic:
            continue
        for problem in find(role_args(args, entry.role)):
            if problem not in known:
                yield f"--megatron-config-path {path}: {entry.role}: {problem}"


# ---- engines and processes


def replaceable_processes(args: Namespace) -> None:
    """A process that holds state is replaced by starting from a checkpoint, so that needs ``--save``."""
    if args.use_fault_tolerance and not args.debug_rollout_only and args.save is None:
        text = "engines that die are replaced; a trainer rank that dies ends the run, because there is no --save"
        groups.info(args, "--use-fault-tolerance", text)


def _heartbeats(args: Namespace) -> Iterator[str]:
    if args.heartbeat_timeout != 0 and args.heartbeat_timeout < 1:
        yield (
            f"--heartbeat-timeout {args.heartbeat_timeout:g} is less than a healthy process may need: "
            "give at least 1 second, or 0 for no heartbeats."
        )


def _engines_port(args: Namespace) -> Iterator[str]:
    if args.engines_port is None:
        return
    start = f"--engines-port {args.engines_port}:"
    if not 0 <= args.engines_port < 2**16:
        yield f"{start} a port is a number from 0 (any free one) to 65535."
    if args.colocate:
        yield (
            f"{start} with --colocate the engines take turns with the trainer on its devices, so their number is that "
            "of the devices. Leave one of the two flags out."
        )
    if args.debug_train_only:
        yield f"{start} --debug-train-only starts no engine. Leave one of the two flags out."


def _first_model(args: Namespace) -> Iterator[str]:
    """Requests without a model name go to the first model of ``--sglang-config``, so that must be trained."""
    is_ours = args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and args.custom_generate_function_path is None
    if args.sglang_config is None or args.debug_train_only or args.debug_rollout_only or not is_ours:
        return
    try:
        models = topology_of(args).models
    except ConfigError:  # the rules of the file report it
        return
    if not models[0].updates_weights and any(model.updates_weights for model in models):
        yield (
            f"--sglang-config {args.sglang_config}: model {models[0].name} is the first, so rollouts are made by it, "
            "but its weights are never updated. Put the model that is trained first."
        )


def _checksums(args: Namespace) -> Iterator[str]:
    if not args.check_weight_update_equal or args.debug_train_only:
        return
    if not accelerator.current().is_cpu or _widest_engine(args) > 1:
        text = "engines of several devices, or on GPUs, are compared after the first sync only, with their checkpoint"
        if args.load is None:
            groups.info(args, "--check-weight-update-equal", text)
        else:
            groups.warn(args, "--check-weight-update-equal", f"no effect with --load: {text}")
    yield from ()


def _widest_engine(args: Namespace) -> int:
    """Devices of the widest engine that receives weights."""
    if args.rollout_external:
        infos = vars(args).get("rollout_external_engine_infos") or []  # absent in a plan, which asks no engine
        return max((info["num_gpus"] for info in infos), default=1)
    try:
        trained = [model for model in topology_of(args).models if model.updates_weights]
    except ConfigError:  # the rules of the file report it
        return 1
    widths = [group.num_gpus_per_engine for model in trained for group in model.groups if group.num_engines]
    return max(widths, default=1)


# ---- this machine


def _transport(args: Namespace) -> Iterator[str]:
    if args.rollout_data_transport == "nixl" and importlib.util.find_spec("nixl") is None:
        yield (
            "--rollout-data-transport nixl needs the package nixl on every node: pip install nixl, or use object-store."
        )


def _writable(args: Namespace) -> Iterator[str]:
    # Otherwise hours of training end at the first checkpoint. slime doctor checks the free space.
    for flag, path in ((flag_of(name), vars(args)[name]) for name in _WRITTEN):
        if not path:
            continue
        place = next(parent for parent in (Path(path), *Path(path).parents) if parent.is_dir())
        if not os.access(place, os.W_OK):
            yield f"{flag} {path}: {place} cannot be written: name another directory, or change its rights."


def _hub(args: Namespace) -> Iterator[str]:
    # The first export may be hours after the start. Nothing asks the Hub here.
    if args.push_to_hub is None:
        return
    from huggingface_hub import get_token, is_offline_mode

    flag = f"--push-to-hub {args.push_to_hub}"
    if is_offline_mode():
        yield f"{flag} needs the Hub, but HF_HUB_OFFLINE is set in the environment: unset it, or drop the flag."
    elif get_token() is None:
        yield f"{flag} needs a token that may write: set HF_TOKEN in the environment, or run hf auth login."


def _open_files(args: Namespace) -> Iterator[str]:
    # Ray fails in the middle of its start otherwise. slime doctor names a good limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_OPEN_FILES:
        limit = f" (the hard limit is {hard}: the system's administrator raises it)" if 0 <= hard < 65536 else ""
        yield (
            f"ulimit -n is {soft}: a process may open that many files and sockets, and a run needs at least "
            f"{_MIN_OPEN_FILES}. Run ulimit -n 65536 in the shell that starts it{limit}."
        )


def _device_memory(args: Namespace) -> Iterator[str]:
    # In a running cluster the devices may be those of other machines: the placement asks them.
    if not os.environ.get("RAY_ADDRESS") and not accelerator.current().is_cpu and is_judged(args):
        yield from colocation_problems(args, gpu_bytes())


def _other_cluster(args: Namespace) -> Iterator[str]:
    """Report a Ray cluster on this machine that the run would not use: no problem, but hardly ever intended."""
    if os.environ.get("RAY_ADDRESS"):
        return
    # the file in which ``ray start`` leaves the address; it stays after a crash of the cluster
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return
    groups.warn(
        args,
        "RAY_ADDRESS",
        f"not set, but a Ray cluster runs on this machine at {address}: the run starts another Ray on this machine "
        f"alone. Set RAY_ADDRESS={address} to use the cluster",
    )
    yield from ()


Rules = tuple[Callable[[Namespace], Iterable[str]], ...]
_NORM_FIELDS = {"role", "rollout_id", "step_id"}


def _norm_templates(args: Namespace) -> Iterator[str]:
    for name in ("ci_save_grad_norm", "ci_load_grad_norm"):
        template = vars(args)[name]
        if template is None:
            continue
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
        except ValueError as error:
            yield f"{flag_of(name)} {template} is no template: {error}."
            continue
        needed = {"rollout_id", "step_id"} | ({"role"} if args.use_critic else set())
        if fields - _NORM_FIELDS or needed - fields:
            named = ", ".join(f"{{{field}}}" for field in sorted(needed))
            yield f"{flag_of(name)} {template} must name one file for each norm: use {named}, and no other field."
    if args.ci_save_grad_norm is not None and args.ci_load_grad_norm is not None:
        groups.warn(args, "--ci-load-grad-norm", "no effect: --ci-save-grad-norm writes the norms instead")


def _needs_ci_test(args: Namespace) -> Iterator[str]:
    for name in ("ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold"):
        if name in args.given and not args.ci_test:
            groups.warn(args, flag_of(name), "no effect without --ci-test")
    yield from ()


RULES: Rules = (_first_model, _engines_port, _heartbeats, _checksums, check_roles, check_adapters)
CI_RULES: Rules = (_norm_templates, _needs_ci_test)
ROLE_RULES: Rules = (_roles,)
ROLE_HOOK_RULES: Rules = (_role_hooks,)
MACHINE_RULES: Rules = (_transport, _writable, _hub, _open_files, _device_memory, _other_cluster)
