"""Questions about the signature of a user's function, which is read once per function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["accepted_kwargs", "accepts", "annotation", "can_be_called", "parameter_names"]


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return _remembered(function)
    except TypeError:  # an object that cannot be hashed, such as an instance of most dataclasses
        return _read(function)


@functools.cache
def _remembered(function: Callable[..., Any]) -> inspect.Signature | None:
    return _read(function)


def _read(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins and extension types have none
        return None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of all parameters, without ``*args`` and ``**kwargs``."""
    signature = _signature(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [] if signature is None else [p.name for p in signature.parameters.values() if p.kind not in variadic]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter of this very name; ``**kwargs`` does not count."""
    return name in parameter_names(function)


def annotation(function: Callable[..., Any], position: int) -> str:
    """The annotation of a parameter, in lower case and without ``typing.``; empty where there is none."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())[position : position + 1]
    texts = [str(p.annotation) for p in parameters if p.annotation is not inspect.Parameter.empty]
    return "".join(texts).lower().replace("typing.", "").removeprefix("collections.abc.")


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
        return True
    keywords = {name[1:]: None for name in call if name[0] == "*"}
    keywords |= accepted_kwargs(function, {name[1:]: None for name in call if name[0] == "?"})
    try:
        signature.bind(*(name for name in call if name[0] not in "*?"), **keywords)
    except TypeError:
        return False
    return True
