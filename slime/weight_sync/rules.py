"""Rules about how weights reach the engines.

Called by ``slime.ray.arguments`` after the flags are resolved. The package's file holds the rules of each transport,
``slime.config.check.cluster`` checks that the flags it requires are given.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from slime.config import groups
from slime.config.groups import flag_of
from slime.models.config_json import read_model_config
from slime.weight_sync import TRANSPORTS

_SENDABLE = ("fp8", "compressed-tensors")


def _unused(args: Namespace) -> Iterator[str]:
    for name, transport in TRANSPORTS.items():
        for flag in transport.reads if name != args.update_weight_transport else ():
            if flag in args.given:
                groups.warn(args, flag_of(flag), f"no effect: only --update-weight-transport {name} reads it")
    if args.update_weight_mode == "full" and "update_weight_delta_encoding" in args.given:
        groups.warn(args, "--update-weight-delta-encoding", "no effect: only --update-weight-mode delta reads it")
    if args.update_weight_mode == "full" and args.update_weight_transport == "disk" and args.update_weight_changed_only:
        text = "no effect: full versions hold everything, see --update-weight-mode delta"
        groups.warn(args, "--update-weight-changed-only", text)
    yield from ()  # notices only: no problem ends the run


def _quantization(args: Namespace) -> Iterator[str]:
    """The format of the engines' weights must be one that can be sent."""
    if args.debug_train_only or args.debug_rollout_only:
        return  # nothing is sent
    # {} if there is no config.json, which another check reports
    config = read_model_config(args.hf_checkpoint).get("quantization_config")
    if not isinstance(config, dict):
        if args.sglang_quantization not in (None, "unquant") and args.sglang_load_format != "flash_rl":
            yield (
                f"--sglang-quantization {args.sglang_quantization} does not work with --hf-checkpoint "
                f"{args.hf_checkpoint}, which is not quantized: SGLang replaces the parameters when it has quantized "
                "them, and cannot load new weights into them. Use a checkpoint that is quantized (fp8, "
                "compressed-tensors), or --sglang-load-format flash_rl where SGLang supports it for the model."
            )
        return
    method = config.get("quant_method")
    if method not in _SENDABLE:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint} is quantized by quant_method {method}, in which weights cannot be "
            f"sent to engines: use a checkpoint of {' or '.join(_SENDABLE)}, or an unquantized one."
        )
    if args.check_weight_update_equal:
        yield (
            f"--check-weight-update-equal does not work with --hf-checkpoint {args.hf_checkpoint}, which is quantized "
            f"({method}): engines repack such weights, so there is nothing to compare with. Leave the flag out."
        )


RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (
    _unused,
    lambda args: TRANSPORTS[args.update_weight_transport].check(args),
    _quantization,
)
