"""The rules of the trainer's flags, by backend. Called by ``arguments`` and, once per role, by ``role_rules``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.backends.fsdp_utils import argument_rules as fsdp_rules
from slime.backends.megatron_utils import argument_rules as megatron_rules
from slime.backends.megatron_utils.model_shape import check_against_hf, read_shape
from slime.backends.megatron_utils.precision_rules import int4, kv_fp8
from slime.config import notices
from slime.config.groups import flag_of
from slime.models.registry import FAMILIES
from slime.utils.errors import ConfigError

__all__ = ["RULES", "other_model_flags"]


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
    """Compute is balanced by the sizes of the model, which are known for the families of Megatron's backend only."""
    if args.train_backend == "megatron" or args.hf_checkpoint is None:
        return
    for name in ("balance_data", "balance_by_flops"):
        if getattr(args, name) and not _is_known(args.hf_checkpoint):
            yield f"{flag_of(name)} does not know how much this model of --hf-checkpoint {args.hf_checkpoint} computes."


def _is_known(hf_checkpoint: str) -> bool:
    try:
        read_shape(hf_checkpoint)
    except ConfigError:
        return False
    return True


def _converter(args: Namespace) -> Iterator[str]:
    """Weights are converted by the table of the model's family; a name for it may be given, but it decides nothing."""
    if args.model_name is None or args.hf_checkpoint is None or not _is_known(args.hf_checkpoint):
        return
    family = read_shape(args.hf_checkpoint).family.model_type
    named = _family_named(args.model_name)
    if named != family:
        what = f"names the converter of {named}" if named else f"names none of {', '.join(sorted(FAMILIES))}"
        yield (
            f"--model-name {args.model_name} {what}, but --hf-checkpoint {args.hf_checkpoint} holds a model of type "
            f"{family}: leave it out."
        )


def _family_named(name: str) -> str | None:
    """``qwen3moeconfig``, ``Qwen3-MoE`` and ``qwen3_moe`` are the same; the longest type inside the name counts."""
    wanted = _plain(name)
    inside = [family for family in FAMILIES if _plain(family) in wanted]
    around = [family for family in FAMILIES if wanted and wanted in _plain(family)]
    return max(inside, key=len, default=None) or min(around, key=len, default=None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def other_model_flags(args: Namespace) -> None:
    """Flags of the model's shape that FSDP does not read: it builds the model of config.json, whatever they say."""
    if args.train_backend == "megatron":
        if args.attn_implementation is not None:
            flag = f"--attn-implementation {args.attn_implementation}"
            notices.warn(args, flag, "no effect: --train-backend megatron has attention of its own")
        return
    if args.hf_checkpoint is None or not _is_known(args.hf_checkpoint):
        return  # another rule asks for it; a model that only transformers knows has nothing to compare with
    for problem in check_against_hf(args):
        flag, _, rest = problem.partition(" ")
        notices.warn(args, flag, f"{rest} It is ignored: --train-backend fsdp builds the model of config.json.")


def _fake_quantisation(args: Namespace) -> Iterator[str]:
    """Not rules of the offline tools: they do not train."""
    if not args.debug_rollout_only and args.hf_checkpoint is not None:
        yield from int4(args)
        yield from kv_fp8(args)


RULES = (_backend, _balance, _converter, _fake_quantisation)
