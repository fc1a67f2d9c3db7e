"""A stand-in of the module ``ray``: actors are objects in simulated processes, calls are messages with a delay.

Arguments and results are copied by pickle, as between processes. A call to a dead actor fails with Ray's own error
types. Calls of one process to one actor arrive in order. Objects are lost with the process that put them.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import io
import itertools
import pickle
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from tests.simulation.world import Ended, Process, world

_LATENCY_S = 0.002
_START_S = 0.05
_DEATH_NOTICED_S = 1.0
T = TypeVar("T")
_NAMES = {"RolloutManager": "manager", "DataBuffer": "buffer", "TrainActor": "trainer"}


@dataclass(frozen=True)
class Later:
    """The result of an ``inline`` method that is sent after ``seconds``."""

    value: Any
    seconds: float


Steps: TypeAlias = Generator[float, None, T]
"""A method of a simulated actor that yields the seconds that it waits. It needs no thread."""


@functools.cache
def _has_steps(cls: type, method: str) -> bool:
    return inspect.isgeneratorfunction(getattr(cls, method))


def waited(steps: Steps[T]) -> T:
    """The result of ``steps``, in a thread that waits."""
    while True:
        try:
            seconds = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        world().sleep(seconds)


def inline(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of a simulated actor that never waits: it needs no thread."""
    method.is_inline = True  # type: ignore[attr-defined]
    return method


class Ref:
    """``ray.ObjectRef``."""

    def __init__(self, actor: Actor | None = None, owner: Process | None = None) -> None:
        self.actor, self.owner = actor, owner
        self.is_done = False
        self.data: Any = None
        self.error: Exception | None = None
        self.waiting: list[Any] = []
        here = world()
        self.number = len(here.globals.setdefault("refs", []))
        here.globals["refs"].append(self)

    def resolve(self, data: Any, error: Exception | None = None) -> None:
        if self.is_done:
            return
        self.is_done, self.data, self.error = True, data, error
        for thread in self.waiting:
            world().wake(thread)
        self.waiting.clear()

    def value(self) -> Any:
        if self.error is not None:
            if isinstance(self.error, RayTaskError):
                raise self.error.as_instanceof_cause()
            raise self.error
        if self.owner is not None and self.owner.is_dead:
            raise ObjectLostError(f"{self.number:x}", "", "")
        return _loads(self.data)

    def task_id(self) -> Any:
        actor = self.actor
        return SimpleNamespace(actor_id=lambda: SimpleNamespace(hex=lambda: "" if actor is None else actor.id))

    def binary(self) -> bytes:
        return b"%d" % self.number

    def __reduce__(self) -> Any:
        return _ref, (self.number,)


def _ref(number: int) -> Ref:
    ref: Ref = world().globals["refs"][number]
    return ref


class Handle:
    """Handle of an actor."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__ray_ready__":
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *args, **kwargs: self._actor.call(name, args, kwargs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._actor is self._actor

    def __hash__(self) -> int:
        return self._actor.process.number

    def __reduce__(self) -> Any:
        return _handle, (self._actor.process.number,)


def _handle(number: int) -> Handle:
    return Handle(world().processes[number].actor)  # type: ignore[attr-defined]


_PLAIN = {type(None), bool, int, float, str}


def _reduce_arguments(args: Namespace) -> Any:
    """The 1500 plain values of the arguments are shared, not encoded. Lists and dicts are copied as all else."""
    shared = world().globals.setdefault("arguments", [])
    shared.append(vars(args).copy())
    is_copied = map(_PLAIN.isdisjoint, zip(map(type, vars(args).values()), strict=True))
    return _arguments, (len(shared) - 1, dict(itertools.compress(vars(args).items(), is_copied)))


def _arguments(number: int, others: dict[str, Any]) -> Namespace:
    args = Namespace()
    args.__dict__ = world().globals["arguments"][number] | others
    return args


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16 or tensor.requires_grad:
        return tensor.__reduce_ex__(5)
    return torch.from_numpy, (tensor.numpy(),)  # torch's own way writes a file in a file


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Namespace: _reduce_arguments, torch.Tensor: _reduce_tensor}


def _dumps(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def _loads(data: Any) -> Any:
    return pickle.loads(data) if type(data) is bytes else data


def copied(value: Any) -> Any:
    """A copy, as of an argument of a call."""
    return _loads(_dumps(value))


class Actor:
    """An actor in a process of the simulated world."""

    def __init__(self, cls: type, args: Any, kwargs: Any, concurrency: int) -> None:
        here = world()
        name = getattr(cls, "process_name", _NAMES.get(cls.__name__, cls.__name__))
        self.process = here.process(name(*args) if callable(name) else name)
        self.process.actor = self  # type: ignore[attr-defined]
        self.id = f"{self.process.number:08x}"
        self.process.on_death.append(self._on_death)
        self._parent = here.current.process
        self._parent.on_death.append(lambda: here.kill(self.process))  # an actor ends with the process that made it
        self._body: Any = None
        self._queue: deque[tuple[Ref, str, bytes]] = deque()
        self._open: dict[Ref, None] = {}
        self._arrivals: dict[int, float] = {}
        self._num_running, self._concurrency = 0, concurrency
        self._init_error: Exception | None = None
        data = _dumps((args, kwargs))
        here.note(f"actor {self.process.name}")

        def construct() -> None:
            here.globals.get(f"new {self.process.name}", lambda: None)()
            arguments, keywords = _loads(data)
            try:
                self._body = cls(*arguments, **keywords)
            except Exception as error:
                self._init_error = error
                here.kill(self.process)
                raise Ended from None
            self._pump()

        delay = _START_S * (0.5 + here.random.random())
        here.at(delay, lambda: self.process.is_dead or here.spawn("constructor", construct, self.process))

    def call(self, method: str, args: Any, kwargs: Any) -> Ref:
        here = world()
        here.check()
        here.perhaps_yield()
        ref = Ref(self)
        self._open[ref] = None
        if not (method == "has_ended" or method == "under_way" or method == "is_responsive"):
            here.note(f"call {here.current.process.name} -> {self.process.name}.{method}")
        if self.process.is_dead:
            here.at(_LATENCY_S, lambda: self._fail(ref))
            return ref
        args = [arg.value() if isinstance(arg, Ref) and arg.is_done else arg for arg in args]
        kwargs = {k: arg.value() if isinstance(arg, Ref) and arg.is_done else arg for k, arg in kwargs.items()}
        data = _dumps((args, kwargs))
        sender = here.current.process
        at = here.now + here.globals["network"].delay_s(sender, self.process, _LATENCY_S)
        at = self._arrivals[sender.number] = max(at, self._arrivals.get(sender.number, 0.0))
        here.at(at - here.now, lambda: self._arrive(ref, method, data))
        return ref

    def _arrive(self, ref: Ref, method: str, data: bytes) -> None:
        if not self.process.is_dead:
            self._queue.append((ref, method, data))
            self._pump()

    def _pump(self) -> None:
        while self._queue and self._body is not None and self._num_running < self._concurrency:
            ref, method, data = self._queue.popleft()
            if method == "__ray_ready__":
                self._reply(ref, True)
                continue
            function = getattr(self._body, method)
            if getattr(function, "is_inline", False) and not self.process.is_paused:
                self._run(ref, function, data)
                continue
            self._num_running += 1
            if _has_steps(type(self._body), method):
                args, kwargs = _loads(data)
                self._advance(ref, function(*args, **kwargs))
            else:
                world().spawn(method, lambda r=ref, f=function, d=data: self._serve(r, f, d), self.process)

    def _serve(self, ref: Ref, function: Any, data: Any) -> None:
        self._run(ref, function, data)
        self._num_running -= 1
        self._pump()

    def _run(self, ref: Ref, function: Any, data: Any) -> None:
        args, kwargs = _loads(data)
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            self._fail_task(ref, function.__name__, error)
        else:
            self._reply(ref, value)

    def _advance(self, ref: Ref, steps: Steps[Any]) -> None:
        """Run a method up to the next moment at which it waits."""
        here = world()
        if self.process.is_dead:
            return
        if self.process.is_paused:  # a thread that is held until the process goes on
            here.spawn("verb", lambda: self._advance(ref, steps), self.process)
            return
        try:
            seconds = next(steps)
        except StopIteration as end:
            self._reply(ref, end.value)
        except Exception as error:
            self._fail_task(ref, steps.__name__, error)
        else:
            here.at(seconds, lambda: self._advance(ref, steps))
            return
        self._num_running -= 1
        self._pump()

    def _fail_task(self, ref: Ref, name: str, error: Exception) -> None:
        if self.process.is_dead or world().is_closing:
            raise Ended(self.process.name) from None
        if isinstance(error, RayActorError):  # as Ray: the error of the task that waited for a dead actor
            error = RayTaskError(name, "traceback", error)
        elif not isinstance(error, RayTaskError):
            error = RayTaskError(name, _traceback(error), error)
        self._reply(ref, None, error)

    def _reply(self, ref: Ref, value: Any, error: Exception | None = None) -> None:
        here, seconds = world(), 0.0
        if isinstance(value, Later):
            value, seconds = value.value, value.seconds
        data = None if error is not None else _dumps(value)
        delay = seconds + here.globals["network"].delay_s(self.process, self._parent, _LATENCY_S)

        def arrive() -> None:
            self._open.pop(ref, None)
            ref.resolve(data, error)

        here.at(delay, arrive)

    def _on_death(self) -> None:
        here = world()
        for ref in list(self._open):
            here.at(here.random.random() * _DEATH_NOTICED_S, lambda r=ref: self._fail(r))
        self._queue.clear()

    def _fail(self, ref: Ref) -> None:
        error = ActorDiedError()
        error.actor_id = self.id
        if self._init_error is not None:
            error._actor_init_failed = True
        self._open.pop(ref, None)
        ref.resolve(None, error)


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error)[-6:]) if world().trace is not None else str(error)


class _ActorClass:
    def __init__(self, cls: type, options: dict[str, Any]) -> None:
        self._cls, self._options = cls, options

    def options(self, **options: Any) -> _ActorClass:
        return _ActorClass(self._cls, self._options | options)

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        world().check()
        return Handle(Actor(self._cls, args, kwargs, self._options.get("max_concurrency", 1)))


SUBSTITUTES: dict[type, type] = {}
"""Classes of actors that a simulated one replaces."""


def remote(cls: type) -> _ActorClass:
    return _ActorClass(SUBSTITUTES.get(cls, cls), {})


def wait(refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
    here = world()
    here.check()
    until = None if timeout is None else here.after(timeout)
    wanted = min(num_returns, len(refs))
    while len(pending := [ref for ref in refs if not ref.is_done]) > len(refs) - wanted:
        if until is not None and here.now >= until:
            break
        for ref in pending:
            ref.waiting.append(here.current)
        here.park(None if until is None else until - here.now)
        for ref in pending:
            if here.current in ref.waiting:
                ref.waiting.remove(here.current)
    done: list[Ref] = []
    others: list[Ref] = []
    for ref in refs:
        (done if ref.is_done and len(done) < num_returns else others).append(ref)
    return done, others


def get(refs: Any, timeout: float | None = None) -> Any:
    wanted = [refs] if isinstance(refs, Ref) else list(refs)
    done, _ = wait(wanted, num_returns=len(wanted), timeout=timeout)
    if len(done) < len(wanted):
        raise GetTimeoutError(f"Get timed out: {len(wanted) - len(done)} of {len(wanted)}")
    values = [ref.value() for ref in wanted]
    return values[0] if isinstance(refs, Ref) else values


def put(value: Any, **options: Any) -> Ref:
    here = world()
    ref = Ref(owner=here.current.process)
    ref.resolve(_dumps(value))
    return ref


def kill(handle: Handle) -> None:
    here = world()
    here.check()
    here.kill(handle._actor.process)


def _runtime_context() -> Any:
    actor = getattr(world().current.process, "actor", None)
    return SimpleNamespace(
        get_actor_id=lambda: None if actor is None else actor.id, get_node_id=lambda: "node", gcs_address="gcs"
    )


RAY = SimpleNamespace(
    remote=remote,
    get=get,
    wait=wait,
    put=put,
    kill=kill,
    cancel=lambda ref: None,
    is_initialized=lambda: True,
    get_runtime_context=_runtime_context,
    ObjectRef=lambda name: _ref(int(name)),
    util=SimpleNamespace(get_node_ip_address=lambda: "host"),
)
