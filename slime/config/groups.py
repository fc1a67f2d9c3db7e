"""Argument groups: a flag is a field of a plain frozen dataclass that lives in the room that reads it.

A room declares ``@dataclass(frozen=True) class EvalArgs`` with one ``flag`` (``slime.utils.misc``) per field. This
module turns such classes into argparse options, and the flat namespace back into an instance of the class, so that
code takes the narrow group and only users' hooks get the whole namespace. ``RunConfig`` carries all groups of a run.

    eval_interval: int | None = flag(None, "Evaluate every N rollouts.")

becomes ``--eval-interval N``. The option's type follows the annotation:

    int, float, str              one value
    Literal["a", "b"]            one value out of the choices
    bool, default False          a switch
    bool, default True           a switch that turns it off. ``metadata["off"]`` names it (``"--disable-x"``)
    bool | None                  ``--x`` and ``--no-x``. None means "derive"
    list[T] | None               several values. With ``metadata["append"]`` repeated flags add up
    dict                         a JSON object

Other metadata: ``flags`` (more spellings), ``metavar``, ``choices`` (names of a table), ``joins_words`` (several words
become one text), ``required``, ``derived`` (no flag: resolved from others), and the support of the flag:

    later      the missing feature: the flag parses, but a value other than the default is an error
    no_effect  the reason: accepted for the launch scripts that pass it. The plan lists it as ignored

A :class:`Notice` is a decision about a value that the command line leaves open. The resolution collects notices,
``parse_args`` logs them once (or refuses them, ``--strict-args``), and ``slime plan`` shows them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import types
import typing
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

Group = TypeVar("Group")


def add_group(parser: argparse.ArgumentParser, group: type) -> None:
    """Add one option per field of the dataclass ``group``. Its docstring is the title in ``--help``."""
    section = parser.add_argument_group(_title(group))
    hints = _hints(group)
    for item in dataclasses.fields(group):
        if item.metadata.get("derived"):
            parser.set_defaults(**{item.name: _default(item)})
            continue
        section.add_argument(*_spellings(item), dest=item.name, **_option(item, hints[item.name]))


def groups_in(*modules: types.ModuleType) -> list[type]:
    """The groups of ``arguments`` modules: ``GROUPS`` if a module has that, else the dataclasses that it defines."""
    return [group for module in modules for group in vars(module).get("GROUPS") or _defined_in(module)]


def _defined_in(module: types.ModuleType) -> list[type]:
    # A module may import groups of other modules.
    own = [item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
    return sorted(filter(dataclasses.is_dataclass, own), key=lambda group: group.__name__)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag as declared: for documentation, the plan and the checks."""

    group: str
    name: str
    spellings: tuple[str, ...]
    default: Any
    help: str
    later: str | None
    no_effect: str | None


def flags_of(groups: Sequence[type]) -> Iterator[Flag]:
    """Every flag of ``groups`` in declaration order, without the derived fields."""
    for group in groups:
        for item in dataclasses.fields(group):
            if not item.metadata.get("derived"):
                yield Flag(
                    group=_title(group),
                    name=item.name,
                    spellings=tuple(_spellings(item)),
                    default=_default(item),
                    help=item.metadata.get("help", ""),
                    later=item.metadata.get("later"),
                    no_effect=item.metadata.get("no_effect"),
                )


def unsupported_flags(args: argparse.Namespace, groups: Sequence[type]) -> Iterator[str]:
    """One problem per flag whose value asks for something that does not exist yet."""
    for flag in flags_of(groups):
        value = vars(args)[flag.name]
        if flag.later and value != flag.default:
            shown = "" if isinstance(value, bool) else f" {value}"
            yield f"{flag.spellings[0]}{shown} is not supported yet: {flag.later.rstrip('.')}. Leave it out."


def ignored_flags(args: argparse.Namespace, groups: Sequence[type]) -> Iterator[tuple[str, str]]:
    """(flag, why) for each given flag that has no effect here."""
    for flag in flags_of(groups):
        if flag.no_effect and flag.name in args.given:
            yield flag.spellings[0], flag.no_effect


def from_args(group: type[Group], args: argparse.Namespace) -> Group:
    """The instance of ``group`` that the flat namespace describes. A field that ``args`` lacks keeps its default.

    Parsed arguments lack none. Plain namespaces of users' programs and tests do.
    """
    names = (item.name for item in dataclasses.fields(group))  # type: ignore[arg-type]
    return group(**{name: vars(args)[name] for name in names if name in vars(args)})


def with_values(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """A copy of ``args`` with other values. Other holders of ``args`` do not see them."""
    return argparse.Namespace(**(vars(args) | values))


def defaults_of(groups: Sequence[type]) -> dict[str, Any]:
    """Field -> default of every group."""
    return {item.name: _default(item) for group in groups for item in dataclasses.fields(group)}


def flag_of(name: str) -> str:
    """``eval_interval`` -> ``--eval-interval``."""
    return "--" + name.replace("_", "-")


def json_object(text: str) -> dict[str, Any]:
    """argparse type of flags that take a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object such as '{{\"key\": 1}}'")
    return value


def _title(group: type) -> str:
    # Only the first line of the docstring is shown.
    return (group.__doc__ or group.__name__).strip().splitlines()[0].rstrip(".")


@functools.cache
def _hints(group: type) -> dict[str, Any]:
    return typing.get_type_hints(group)


def _default(item: dataclasses.Field[Any]) -> Any:
    # A new object for each call: defaults may be lists and dicts.
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _spellings(item: dataclasses.Field[Any]) -> Sequence[str]:
    first = item.metadata.get("off", flag_of(item.name))
    return (first, *item.metadata.get("flags", ()))


def _option(item: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    default = _default(item)
    option: dict[str, Any] = {"default": default, "help": item.metadata.get("help", "")}
    if item.metadata.get("required"):
        option["required"] = True
    inner, is_optional = _strip_optional(hint)
    if inner is bool:
        if is_optional:
            return option | {"action": argparse.BooleanOptionalAction}
        return option | {"action": "store_false" if default is True else "store_true"}
    if "metavar" in item.metadata:
        option["metavar"] = item.metadata["metavar"]
    origin = typing.get_origin(inner)
    if inner is dict or origin is dict:
        return option | {"type": json_object}
    if origin is list:
        option["nargs"] = item.metadata.get("nargs", "+")
        if item.metadata.get("append"):
            option["action"] = "extend"
        inner = typing.get_args(inner)[0]
        origin = typing.get_origin(inner)
    if origin is Literal:
        choices = typing.get_args(inner)
        return option | {"choices": choices, "type": type(choices[0])}
    if "choices" in item.metadata:
        option["choices"] = tuple(item.metadata["choices"])
    if item.metadata.get("joins_words"):
        option |= {"nargs": "+", "action": _JoinWords}
    if inner not in (int, float, str):
        raise TypeError(f"field {item.name}: annotation {hint!r} has no command-line form")
    return option | {"type": inner}


class _JoinWords(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, *_: Any) -> None:
        setattr(args, self.dest, " ".join(values))


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 1:
            return members[0], True
    return hint, False


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts that a run learns while it starts. None until then.

    Attributes:
        routers: address (host, port) of each model's router, the first one is that of the trained model.
        start_rollout_id: first rollout of this run, 0 or the one after the loaded checkpoint.
        num_rollout: end of the run, from ``--num-rollout`` or the length of the prompt file.
    """

    routers: Mapping[str, tuple[str, int]] | None = None
    start_rollout_id: int | None = None
    num_rollout: int | None = None

    def attributes(self) -> dict[str, Any]:
        """The facts under the names that plugins read: ``args.sglang_router_ip``, ``args.num_rollout``."""
        found: dict[str, Any] = {}
        if self.num_rollout is not None:
            found["num_rollout"] = self.num_rollout
        if self.routers:
            found["sglang_model_routers"] = dict(self.routers)
            found["sglang_router_ip"], found["sglang_router_port"] = next(iter(self.routers.values()))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class RunConfig:
    """The resolved command line as one frozen object with typed sections, carried through a run.

        config[ClusterArgs].train_timeout   a section: one of the argument groups, or any dataclass with fields of args
        config.facts.num_rollout            facts that the run learns while it starts
        config.args                         the namespace that users' hooks and plugins receive

    Built once, by :meth:`of`. A change gives a new object: ``with_facts``, ``with_values``. Sections and ``args`` are
    made on first use and kept for the process.

    Attributes:
        values: every resolved argument by name.
    """

    values: Mapping[str, Any]
    facts: RunFacts = dataclasses.field(default_factory=RunFacts)
    _shared: Namespace | None = None

    @classmethod
    def of(cls, args: Namespace, *, is_shared: bool = False) -> RunConfig:
        """The configuration in ``args``, which is copied: later writes to ``args`` do not change it.

        Args:
            is_shared: hooks get ``args`` itself.
        """
        return cls(dict(vars(args)), _shared=args if is_shared else None)

    def __getitem__(self, section: type[Group]) -> Group:
        """The dataclass ``section`` filled by field name. A field that the arguments lack keeps its default."""
        if section not in self._sections:
            names = [item.name for item in dataclasses.fields(cast(Any, section)) if item.init]
            self._sections[section] = section(**{n: self._merged[n] for n in names if n in self._merged})
        return cast(Group, self._sections[section])

    @cached_property
    def args(self) -> Namespace:
        """The namespace for users' hooks and plugins: every argument, and the facts."""
        # One object per process, because hooks keep state in it: ``with_facts`` adds to it instead of making another.
        if self._shared is not None:
            return self._shared
        vars(args := Namespace()).update(self._merged)  # Namespace(**...) would set 1500 attributes one by one
        return args

    def with_facts(self, **facts: Any) -> RunConfig:
        """The configuration after the start has learned ``facts`` (fields of :class:`RunFacts`)."""
        learned = dataclasses.replace(self.facts, **facts)
        # Objects made before, such as the state of generation, hold this namespace and read the router in it.
        vars(self.args).update(learned.attributes())
        return dataclasses.replace(self, facts=learned, _shared=self.args)

    def with_values(self, **values: Any) -> RunConfig:
        """The configuration with other arguments: for a role, or for a run that starts again."""
        return RunConfig({**self.values, **values}, self.facts)

    @cached_property
    def _merged(self) -> dict[str, Any]:
        return {**self.values, **self.facts.attributes()}

    @cached_property
    def _sections(self) -> dict[type, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Only the fields travel: a hook may have put something into args that cannot be pickled.
        return {"values": self.values, "facts": self.facts}


@dataclass(frozen=True)
class Notice:
    """One decision. ``warning``: probably unintended, an error under ``--strict-args``. ``info``: a default."""

    level: Literal["info", "warning"]
    flag: str
    text: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.text}"


def warn(args: Namespace, flag: str, text: str) -> None:
    """Record that ``flag`` (with dashes) was dropped, replaced or guessed, and why."""
    args.notices.append(Notice("warning", flag, text))


def info(args: Namespace, flag: str, text: str) -> None:
    """Record how the value of ``flag`` was derived."""
    args.notices.append(Notice("info", flag, text))
