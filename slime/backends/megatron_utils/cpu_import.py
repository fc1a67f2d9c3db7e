"""megatron.core without CUDA: its modules are compiled from a rewritten syntax tree. Installed on cpu only.

What: while ``megatron.core.*`` is imported, the constant ``"cuda"`` becomes ``"cpu"``, ``"torch.cuda.FloatTensor"``
becomes ``"torch.FloatTensor"``, ``torch.cuda`` becomes a substitute module, ``x.cuda()`` becomes ``x`` and
``pin_memory=`` is dropped. File names and line numbers stay, so tracebacks are true.

Why: megatron-core 0.16.1 names the CUDA device literally in about 440 places, compares ``Tensor.type()`` with CUDA type
names, and reads CUDA generators. Patching torch instead changes torch for the whole process: replaced factories break
``torch.device`` contexts silently, and a function mode holds for one thread only.

Upstream: no CPU training backend exists in core_v0.16.1 and no issue asks for one. Delete when megatron-core gets its
device, streams and generators from one object that can be the cpu.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime.utils.files import is_private_directory, replacing

_STAND_IN = "slime_megatron_cpu_cuda"
_CACHE_VERSION = b"slime-1"  # raise it with every change of _Rewrite: otherwise old code objects stay in use
# Packages that megatron.core imports when they are there. Some need a CUDA driver to import (flash_mla raises OSError,
# which megatron does not catch), all cost seconds and hundreds of megabytes, and none has a use on cpu.
_OPTIONAL = (
    "amp_C",
    "apex",
    "causal_conv1d",
    "deep_ep",
    "flash_attn",
    "flash_attn_3",
    "flash_mla",
    "flashattn_hopper",
    "flashinfer",
    "mamba_ssm",
    "tensorboard",
    "transformer_engine",
    "wandb",
)


def install() -> None:
    """Rewrite ``megatron.core`` during its imports from now on. Call it before the first import. Idempotent."""
    if _STAND_IN in sys.modules:
        return
    early = [name for name in sys.modules if name.startswith("megatron.core")]
    if early:
        raise RuntimeError(f"megatron.core was imported before the CPU rewriting was installed: {early[0]}")
    sys.modules[_STAND_IN] = _cuda_stand_in()
    sys.meta_path.insert(0, _Finder(_cache_directory()))  # before the standard finder


@contextlib.contextmanager
def light_import() -> Iterator[None]:
    """While megatron.core is imported: optional packages are absent and ``torch.compile`` decorates nothing.

    The import takes 1.6 s instead of 3-10 s. Functions that upstream compiles run eagerly, with equal results.
    """
    absent = [name for name in _OPTIONAL if name not in sys.modules]
    compile_function = torch.compile
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # the documented way to make an import fail
    torch.compile = lambda function=None, **_: function if function is not None else (lambda f: f)  # type: ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Apex and TransformerEngine are missing: known here
            yield
    finally:
        torch.compile = compile_function
        for name in absent:
            if sys.modules.get(name, 0) is None:
                del sys.modules[name]


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event(_Stream):
    record = wait = _nothing

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Generators:
    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator


def _cuda_stand_in() -> types.ModuleType:
    """The module that megatron.core uses as ``torch.cuda``: one device, the cpu, with its generator and no streams."""
    stream = _Stream()
    null = contextlib.nullcontext
    module = types.ModuleType(_STAND_IN)
    module.__dict__.update(
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        ipc_collect=_nothing,
        set_stream=_nothing,
        _lazy_init=_nothing,
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        is_available=lambda: False,
        is_current_stream_capturing=lambda: False,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=lambda *_: null(),
        device=lambda *_: null(),
        _lazy_call=lambda function, **_: function(),
        default_generators=_Generators(),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
        manual_seed_all=_nothing,
        memory_stats=lambda *_: {},
        memory_allocated=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=_nothing,
        mem_get_info=lambda *_: (0, 0),
        get_device_capability=lambda *_: (0, 0),
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=lambda *_: null()),
    )
    module.random = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_rng_state=module.get_rng_state, set_rng_state=module.set_rng_state
    )
    module.__getattr__ = lambda name: getattr(torch.cuda, name)  # type: ignore  # class names: CUDAGraph, FloatTensor
    return module


class _Rewrite(ast.NodeTransformer):
    def __init__(self) -> None:
        self._uses_stand_in = False

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(value.replace(".cuda", "")), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # messages only

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            self._uses_stand_in = True
            return ast.copy_location(ast.Name("_slime_cuda", node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        # Pinning host memory needs a CUDA driver.
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "pin_memory"]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return node.func.value  # x.cuda() -> x
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = _STAND_IN
        return node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        if self._uses_stand_in:
            at = 0
            while at < len(node.body) and _must_stay_first(node.body[at]):
                at += 1
            node.body.insert(at, ast.Import([ast.alias(_STAND_IN, "_slime_cuda")]))
        return node


def _must_stay_first(node: ast.stmt) -> bool:
    # Also the docstring, which is a constant.
    is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return is_future or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source. Caches the code objects in a separate folder, never in ``__pycache__``."""

    def __init__(self, name: str, path: str, cache: Path | None) -> None:
        super().__init__(name, path)
        self._cache = cache

    def get_code(self, fullname: str) -> types.CodeType:
        path = os.path.realpath(self.get_filename(fullname))  # linked environments share the code objects
        stats = self.path_stats(path)
        stamp = int(stats["mtime"]).to_bytes(8, "little") + int(stats["size"]).to_bytes(8, "little")
        # A code object is valid for one version of Python, of the source file and of the rewriting.
        head = importlib.util.MAGIC_NUMBER + stamp + _CACHE_VERSION + path.encode() + b"\0"
        cached = None if self._cache is None else self._cache / f"{fullname}.{sys.implementation.cache_tag}.bin"
        if cached is not None:
            # A damaged cache file is written again.
            with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
                data = cached.read_bytes()
                if data.startswith(head):
                    return marshal.loads(data[len(head) :])
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(self.get_data(path), path)))
        code = compile(tree, path, "exec", dont_inherit=True)
        if cached is not None:
            with contextlib.suppress(OSError), replacing(cached) as partial:
                partial.write_bytes(head + marshal.dumps(code))
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, cache: Path | None) -> None:
        self._cache = cache

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        # not extension modules. beartype and other packages replace the loader by a subclass
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._cache)
        return spec


def _cache_directory() -> Path | None:
    home_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for place in (Path(home_cache).expanduser() / "slime", Path(tempfile.gettempdir()) / f"slime-{os.getuid()}"):
        directory = place / "megatron_cpu"
        # Code is loaded from it: another user must not write there.
        if is_private_directory(place) and is_private_directory(directory):
            return directory
    return None
