"""Registry of accelerator kinds, and the choice for this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.utils.accelerator.devices import Accelerator
from slime.utils.errors import ConfigError


@dataclass(frozen=True)
class _Kind:
    factory: Callable[[], Accelerator]
    is_available: Callable[[], bool]
    priority: int
    communication_backends: tuple[str, ...]


class Registry:
    """Accelerator kinds by name.

    Attributes:
        chosen: set by the user. Overrides every detection.
    """

    def __init__(self) -> None:
        self.chosen: Accelerator | None = None
        self._kinds: dict[str, _Kind] = {}

    def register(
        self,
        name: str,
        factory: Callable[[], Accelerator],
        is_available: Callable[[], bool] | None,
        priority: int,
        communication_backends: Sequence[str],
    ) -> None:
        probe = is_available or (lambda: True)
        self._kinds[name] = _Kind(factory, probe, priority, tuple(communication_backends))

    def choose(self, name: str | None) -> Accelerator:
        """The accelerator ``chosen``, else the kind ``name``, else the available kind with the highest priority.

        Raises:
            ConfigError: ``name`` is not registered.
        """
        if self.chosen is not None:
            return self.chosen
        if not name:
            by_priority = sorted(self._kinds, key=lambda kind: -self._kinds[kind].priority)
            # in order of priority: a probe may import a heavy library, and cpu, the last one, is always available
            name = next(kind for kind in by_priority if self._kinds[kind].is_available())
        if name not in self._kinds:
            raise ConfigError(
                f"SLIME_ACCELERATOR={name!r} is not supported. It must be one of {', '.join(self._kinds)}."
            )
        kind = self._kinds[name]
        found = kind.factory()
        if kind.communication_backends:
            # on the instance: other kinds may use the same class
            found.communication_backends = kind.communication_backends
        return found
