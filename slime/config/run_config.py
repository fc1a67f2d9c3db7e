"""``RunConfig``: the resolved command line as one frozen object with typed sections, carried through a run.

    config[ClusterArgs].train_timeout      a section: one of the argument groups, or any dataclass with fields of args
    config.facts.num_rollout               facts that the run learns while it starts
    config.args                            the namespace that users' hooks and plugins receive

Built once, by :meth:`RunConfig.of`. A change gives a new object: ``with_facts``, ``with_values``.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar, cast

Section = TypeVar("Section")


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
    """One run's configuration. Sections and ``args`` are made on first use and kept for the process.

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

    def __getitem__(self, section: type[Section]) -> Section:
        """The dataclass ``section`` filled by field name. A field that the arguments lack keeps its default."""
        if section not in self._sections:
            names = [item.name for item in dataclasses.fields(cast(Any, section)) if item.init]
            self._sections[section] = section(**{n: self._merged[n] for n in names if n in self._merged})
        return cast(Section, self._sections[section])

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
