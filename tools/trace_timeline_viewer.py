"""Show the traces of a rollout as a timeline in the browser, or write them for Perfetto.

    python tools/trace_timeline_viewer.py outputs/run/samples/rollout_000003.parquet
    python tools/trace_timeline_viewer.py dump/3.pt --perfetto trace.json --no-serve

Reads a rollout that ``--save-debug-rollout-data`` dumped (``.pt``) or that the run recorded (``.parquet``). Writes
``<stem>.trace_timeline_cache.json`` and ``<stem>.trace_timeline_viewer.html`` beside it and serves these two
on loopback until interrupted. The page shows one rollout's slowest samples. For curves and texts use ``slime board``.
"""

from __future__ import annotations

import argparse
import html
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.board.server import OwnHost  # noqa: E402 - the repository's root first
from slime.observability.trace_events import perfetto_events, timeline_rows  # noqa: E402

CACHE_VERSION = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="rollout dump (.pt) or recorded samples (.parquet)")
    parser.add_argument("--rebuild", action="store_true", help="read the dump again although the cache is newer")
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--port", type=int, default=9999)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="also write a trace for ui.perfetto.dev")
    options = parser.parse_args()
    dump: Path = options.dump
    if not dump.is_file():
        raise SystemExit(f"there is no file {dump}")
    if options.perfetto is not None:
        options.perfetto.write_text(json.dumps({"traceEvents": perfetto_events(read_samples(dump))}), encoding="utf-8")
        print(f"perfetto: {options.perfetto}")
    cache = dump.with_name(f"{dump.stem}.trace_timeline_cache.json")
    page = dump.with_name(f"{dump.stem}.trace_timeline_viewer.html")
    data = _cached(cache, dump, options.rebuild)
    page.write_text(_page(dump.name, cache.name), encoding="utf-8")
    print(f"pt: {dump}\ncache: {cache}\nhtml: {page}\nsamples: {data['sample_count']}", flush=True)
    if options.serve:
        _serve(page, cache, options.host, options.port)
    return 0


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Samples as dicts. A dump of foreign classes is read too, without running their code: they become placeholders."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows = pq.read_table(path, columns=["index", "group_index", "status", "reward", "response_length", "trace"])
        return [row | {"trace": json.loads(row["trace"]) if row["trace"] else None} for row in rows.to_pylist()]
    import torch

    # weights_only=False is safe only with this module, which refuses all functions but those of _HARMLESS.
    payload = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Lenient)
    samples = payload["samples"] if isinstance(payload, dict) else payload
    return [sample if isinstance(sample, dict) else vars(sample) for sample in samples]


_HARMLESS = {
    "builtins": ("bytearray", "complex", "frozenset", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "defaultdict"),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "slime.data.sample": ("Sample", "_PrefixCacheInfo", "_SpecInfo", "_Status"),
    "torch": ("Size", "bfloat16", "bool", "device", "float16", "float32", "float64", "int32", "int64", "int8", "uint8"),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor_v2"),
}
"""Module -> names that only hold data. A pickle can name any function, and have it called."""


class _Placeholder:
    """Takes whatever a pickle does to it, and forgets it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    __setstate__ = __setitem__ = append = extend = add = __call__ = _nothing


def _inner_class(owner: Any, name: str) -> Any:
    # A pickle can pass any object to getattr: only nested classes of Sample are looked up.
    is_ours = getattr(owner, "__module__", "") == "slime.data.sample"
    found = getattr(owner, name, None) if is_ours else None
    return found if isinstance(found, type) else type(name, (_Placeholder,), {})


class _Lenient:
    """A pickle module for torch.load that neither needs nor runs the code of the run."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = "builtins" if module == "__builtin__" else module  # torch.save writes the names of Python 2
            if (module, name) == ("builtins", "getattr"):  # how a class inside of another is named
                return _inner_class
            is_storage = module == "torch" and name.isidentifier() and name.endswith("Storage")
            if is_storage or name in _HARMLESS.get(module, ()):
                return super().find_class(module, name)
            print(f"note: {module}.{name} is not known here and is left empty", file=sys.stderr)
            return type(name, (_Placeholder,), {})

    load = staticmethod(pickle.load)


def _cached(cache: Path, dump: Path, rebuild: bool) -> dict[str, Any]:
    if not rebuild and cache.is_file() and cache.stat().st_mtime >= dump.stat().st_mtime:
        known: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8"))
        # A cache of an older version of this tool has other fields.
        if known.get("cache_version") == CACHE_VERSION:
            return known
    data = _build_cache_data(dump)
    cache.write_text(json.dumps(data, default=str), encoding="utf-8")
    return data


def _build_cache_data(pt_path: Path | str) -> dict[str, Any]:
    """The data of the page: ``rows`` of ``trace_events.timeline_rows`` and the time that they cover."""
    rows = timeline_rows(read_samples(Path(pt_path)))
    return {
        "cache_version": CACHE_VERSION,
        "pt_path": str(pt_path),
        "generated_at": time.time(),
        "sample_count": len(rows),
        "global_start": min((row["start"] for row in rows), default=0.0),
        "global_end": max((row["end"] for row in rows), default=0.0),
        "rows": rows,
    }


def _serve(page: Path, cache: Path, host: str, port: int) -> None:
    """Serve these two files, and nothing else of their folder, until Ctrl-C."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import FileResponse
    from starlette.routing import Route

    def answer(request: Request) -> FileResponse:
        return FileResponse(cache if request.url.path.endswith(".json") else page)

    routes = [Route(path, answer) for path in ("/", f"/{quote(page.name)}", f"/{quote(cache.name)}")]
    # The check of the host name stops pages of other sites that point their name at loopback.
    app = Starlette(routes=routes, middleware=[Middleware(OwnHost, names={"localhost", host.lower()})])
    print(f"http://{host}:{port}  (end with Ctrl-C)", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", lifespan="off")


def _page(title: str, cache: str) -> str:
    template = Path(__file__).with_name("trace_timeline_viewer.html").read_text(encoding="utf-8")
    name = json.dumps(cache).replace("<", "\\u003c")  # it is inside of a script element
    return template.replace("{{title}}", html.escape(title)).replace("{{cache}}", name)


if __name__ == "__main__":
    sys.exit(main())
