"""Load users' functions from the paths in flags, and check all of them before anything starts.

    pkg.module.function        dotted
    pkg.module:function        module and attribute
    dir/file.py:function       file and attribute
    dir/file.py                file. The attribute follows from the flag

Files are looked up as given, then in the working directory, then along ``sys.path``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.hooks.protocols import HOOKS, Hook, Role
from slime.utils.async_utils import is_async
from slime.utils.errors import ConfigError, named, translated, undone

# Prefix of the modules that files are loaded as.
_USERS = "slime_user_"

_NAMES: dict[Role, tuple[str, ...]] = {
    "generate": ("custom_generate", "generate"),
    "reward": ("reward_func", "custom_rm", "batched_custom_rm", "CustomRewardModel"),
    "rollout": ("generate_rollout",),
    "filter": ("filter",),
    "data_source": ("DataSource",),
}
_GROUP_REWARD_NAMES = ("batched_custom_rm", *_NAMES["reward"])


@functools.cache
def load_function(path: str, role: Role | None = None, *, group_rm: bool = False) -> Any:
    """The function or class that ``path`` names, loaded once per process.

    Args:
        path: one of the four forms above.
        role: purpose of the function, only needed if ``path`` is a file without an attribute.
        group_rm: among the names of the reward role prefer the one for groups.

    Raises:
        ConfigError: the module or file cannot be imported, or lacks the attribute. The message has the cause.
    """
    if path.endswith(".py"):
        return _by_role(_load_file(path), path, role, group_rm)
    where, _, name = path.rpartition(":" if ":" in path else ".")
    if not where:
        raise ConfigError(f"{path!r} names no function: use module.function, module:function or file.py:function")
    if where.endswith(".py"):
        module = _load_file(where)
    else:
        with _importing(f"module {where!r}"):
            module = importlib.import_module(where)
    try:
        return getattr(module, name)
    except AttributeError:
        public = ", ".join(sorted(_public_callables(module))) or "none"
        raise ConfigError(f"{_shown(module)} has no {name!r}; its public functions: {public}") from None


def load_optional(path: str | None, role: Role | None = None) -> Any:
    """:func:`load_function` of a flag. None if it is not given."""
    return None if path is None else load_function(path, role)


def check_hooks(args: Namespace) -> list[str]:
    """Load every function that ``args`` names and compare it with how it will be called. Returns the problems."""
    problems: list[str] = []
    values = vars(args)
    for hook in HOOKS:
        value = values.get(hook.dest)
        for path in [value] if isinstance(value, str) else value or []:
            problem = _problem(hook, path, group_rm=bool(values.get("group_rm")))
            if problem:
                problems.append(problem)
    return problems


def _problem(hook: Hook, path: str, group_rm: bool) -> str | None:
    try:
        function = load_function(path, hook.role, group_rm=group_rm)
    except ConfigError as error:
        return f"{hook.flag} {path}: {error}"
    if not callable(function):
        return f"{hook.flag} {path} is a {type(function).__name__}, not a function."
    if inspect.isclass(function) and hook.role == "reward":
        return None if _is_reward_class(function) else f"{hook.flag} {path}: the class needs a method compute_reward."
    if is_async(function) and not hook.is_awaited:
        return f"{hook.flag} {path} is an async function, and its result is not awaited: write it as a plain def."
    # A function of one sample must take its sampling parameters, and one of a group may leave them out.
    calls = [hook.calls[takes_group(function)]] if hook.role == "generate" else hook.calls
    if any(can_be_called(function, call) for call in calls):
        return None
    wanted = " or ".join(f"({', '.join(name.lstrip('*?') for name in call)})" for call in hook.calls)
    return (
        f"{hook.flag} {path} is called with {wanted}, but its signature is {inspect.signature(function)} "
        f"(see {hook.protocol.__name__} in slime/hooks/protocols.py)."
    )


def _is_reward_class(cls: type) -> bool:
    # Every class has the ``__call__`` of its metaclass, so only a definition in the class counts.
    own_call = "__call__" in {name for base in cls.__mro__[:-1] for name in vars(base)}
    return own_call or any(hasattr(cls, name) for name in ("compute_reward", "reward_func"))


def _importing(shown: str) -> AbstractContextManager[None]:
    return translated(lambda error: ConfigError(f"{shown} cannot be imported: {named(error)}"), SystemExit)


def _load_file(path: str) -> ModuleType:
    file = _find(path)
    # With a hash: two files of the same name are different modules.
    name = f"{_USERS}{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: its dataclasses and pickles look it up
    forget = functools.partial(sys.modules.pop, name)
    with _importing(str(file)), undone(forget):
        spec.loader.exec_module(module)
    return module


def _find(path: str) -> Path:
    # The working directory first: ``sys.path`` begins with the folder of the driver.
    for base in (Path.cwd(), *map(Path, sys.path)):
        file = base / path  # an absolute path stays as it is
        if file.is_file():
            return file.resolve()
    raise ConfigError(f"there is no file {path} (looked in {Path.cwd()} and along sys.path)")


def _by_role(module: ModuleType, path: str, role: Role | None, group_rm: bool) -> Any:
    if role is None:
        names = tuple(name for group in _NAMES.values() for name in group)
    else:
        names = _GROUP_REWARD_NAMES if role == "reward" and group_rm else _NAMES.get(role, ())
    found = [item for name in names if (item := getattr(module, name, None)) is not None]
    if found and (role is not None or len(found) == 1):
        return found[0]
    public = _public_callables(module)
    if len(public) == 1:
        # A single public function needs no name.
        return next(iter(public.values()))
    raise ConfigError(
        f"{path} does not say which function is meant: add it as {path}:NAME. "
        f"Candidates: {', '.join(sorted(public)) or 'none'}"
    )


def _public_callables(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Functions and classes that the module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        # Imported names are not candidates.
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    }


def name_of(function: Any) -> str:
    """A function for messages: ``file.py:name`` or ``package.module.name``."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", str(function))
    return f"{_shown(sys.modules[module])}:{name}" if module.startswith(_USERS) else f"{module}.{name}"


def _shown(module: ModuleType) -> str:
    return str(module.__file__) if module.__name__.startswith(_USERS) else module.__name__


# ---- signatures of users' functions


# Rewards and generate functions are looked at once per sample.
_signature_of_plain = functools.lru_cache(maxsize=256)(inspect.signature)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return _signature_of_plain(function) if inspect.isfunction(function) else inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins and extension types have none
        return None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of all parameters, without ``*args`` and ``**kwargs``."""
    signature = _signature(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [] if signature is None else [p.name for p in signature.parameters.values() if p.kind not in variadic]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter of this very name. ``**kwargs`` does not count."""
    return name in parameter_names(function)


def annotation(function: Callable[..., Any], position: int) -> str:
    """The annotation of a parameter, in lower case and without ``typing.``, or an empty text."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())[position : position + 1]
    # Annotations are texts in modules with ``from __future__ import annotations``.
    texts = [str(p.annotation) for p in parameters if p.annotation is not inspect.Parameter.empty]
    return "".join(texts).lower().replace("typing.", "").removeprefix("collections.abc.")


def takes_group(function: Callable[..., Any]) -> bool:
    """Whether a generate function generates all samples of a prompt at once."""
    return accepts(function, "samples") or annotation(function, 1).startswith(("list", "sequence"))


def accepted_kwargs(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``kwargs`` that ``function`` can take: all of it when it has ``**kwargs``."""
    signature = _signature(function)
    if signature is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in signature.parameters}


def can_be_called(function: Callable[..., Any], call: Sequence[str]) -> bool:
    """Whether a call with these arguments fits.

    ``*name`` is passed by keyword, ``?name`` by keyword to functions that take it, the others by position.
    """
    signature = _signature(function)
    if signature is None:
        # A signature cannot be read for some built-ins: the call itself decides.
        return True
    keywords = {name[1:]: None for name in call if name[0] == "*"}
    keywords |= accepted_kwargs(function, {name[1:]: None for name in call if name[0] == "?"})
    try:
        signature.bind(*(name for name in call if name[0] not in "*?"), **keywords)
    except TypeError:
        return False
    return True
