"""Small general helpers, and lazy aliases of public names of other modules."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

Item = TypeVar("Item")


def moved(module: str, **origins: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module`` for public names of other modules, which are imported on first use.

    Args:
        origins: name -> its module. Some import heavy libraries such as Ray.
    """

    def __getattr__(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(origins[name]), name)

    return __getattr__


__getattr__ = moved(
    __name__,
    Box="slime.ray.shards",
    decode_int32_meta_array="slime.data.engine_meta",
    get_current_node_ip="slime.utils.net",
    get_free_port="slime.utils.net",
    load_function="slime.hooks",
)


def flag(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field that is a flag (``slime.config.groups``), with ``help_text`` for ``--help`` and the docs."""
    return dataclasses.field(default=default, metadata={"help": help_text, **metadata})


class SingletonMeta(type):
    """Metaclass of classes with one instance per process. Arguments of later calls are ignored."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the instance of this class, so that the next call makes a new one."""
        SingletonMeta._instances.pop(cls, None)


def as_float(text: str) -> float | None:
    """The number of a text. None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether an action with this ``interval`` is due after ``rollout_id``. True at the end of an epoch or run."""
    if interval is None:
        return False
    done = rollout_id + 1  # rollout ids start at 0
    is_last = num_rollout is not None and done == num_rollout
    is_epoch_end = num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0
    return is_last or is_epoch_end or done % interval == 0


def group_by(iterable: Iterable[Item], key: Callable[[Item], Any] | None = None) -> dict[Any, list[Item]]:
    """Group items by ``key(item)``, or by the item itself. The order of the items is kept."""
    groups: dict[Any, list[Item]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, Any]], chunk_size: int
) -> Iterator[list[tuple[str, Any]]]:
    """Yield lists of (name, tensor) of at most ``chunk_size`` bytes. A larger tensor gets a separate list."""
    chunk: list[tuple[str, Any]] = []
    num_bytes = 0
    for name, tensor in named_params:
        size = tensor.numel() * tensor.element_size()
        if chunk and num_bytes + size > chunk_size:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((name, tensor))
        num_bytes += size
    if chunk:
        yield chunk


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run ``cmd`` in bash. Returns its output with ``capture_output``.

    Raises:
        subprocess.CalledProcessError: the exit status is not 0.
    """
    # not shell=True, which is sh: commands use bash's ``source`` and arrays
    result = subprocess.run(
        ["bash", "-c", cmd], check=True, text=True, stdout=subprocess.PIPE if capture_output else None
    )
    return result.stdout if capture_output else None
