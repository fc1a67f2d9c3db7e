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
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.board.server import OwnHost  # noqa: E402 - the repository's root first
from slime.data.dump_file import load_plain  # noqa: E402

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
    payload = load_plain(path, records=("slime.data.sample",))
    samples = payload["samples"] if isinstance(payload, dict) else payload
    return [sample if isinstance(sample, dict) else vars(sample) for sample in samples]


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
    """The data of the page: ``rows`` of :func:`timeline_rows` and the time that they cover."""
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


# Marks of prefill and decode in the viewer.
_PD_PREFIX = {"sglang_pd_prefill": "[P] ", "sglang_pd_decode": "[D] "}


def timeline_rows(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per sample that has a trace, in order.

    Each row's ``items`` are spans (``closed_span``, ``open_span``), events and ends without a beginning
    (``orphan_end``). A lane is a depth of nesting. A span that was never closed is drawn until the next span beside it,
    the end of a span around it, or the end of the row, whichever is first.
    """
    return [_row(number, sample) for number, sample in enumerate(samples) if _events(sample)]


def perfetto_events(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``traceEvents`` of the Chrome trace format: a process per prompt, a thread per sample, microseconds."""
    rows = timeline_rows(samples)
    first = min((row["start"] for row in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for row in rows:
        place = {"pid": row["group_index"] if isinstance(row["group_index"], int) else 0, "tid": row["row_id"]}
        events.append({"name": "process_name", "ph": "M", **place, "args": {"name": f"prompt {row['group_index']}"}})
        named = f"sample {row['sample_index']} reward {row['reward']}"
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": named}})
        for item in row["items"]:
            moment = {"name": item["name"], **place, "ts": (item["start_ts"] - first) * 1e6, "args": _arguments(item)}
            if item["state"] in ("event", "orphan_end"):
                events.append(moment | {"ph": "i", "s": "t"})
            else:
                events.append(moment | {"ph": "X", "dur": (item["display_end_ts"] - item["start_ts"]) * 1e6})
    return events


def _arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    attrs = item["attrs"]
    return {**attrs["start_attrs"], **attrs["end_attrs"], "attempt": item["attempt"], "state": item["state"]}


def _events(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    trace = sample.get("trace")
    return list(trace.get("events") or []) if isinstance(trace, Mapping) else []


def _row(number: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    events = sorted(_events(sample), key=lambda event: event["ts"])
    start, end = events[0]["ts"], events[-1]["ts"]
    items = _items(events, end)
    states = [item["state"] for item in items]
    metadata = sample.get("metadata")
    return {
        "row_id": number,
        "sample_index": sample.get("index"),
        "group_index": sample.get("group_index"),
        "source": metadata.get("source_name") if isinstance(metadata, Mapping) else None,
        "status": sample.get("status"),
        "label": str(sample.get("label"))[:200],
        "reward": sample.get("reward"),
        "trace_id": sample["trace"].get("trace_id"),
        "attempt": sample["trace"].get("attempt", 0),
        "start": start,
        "end": end,
        "duration": end - start,
        "lane_count": 1 + max((item["lane"] for item in items), default=0),
        "item_count": len(items),
        "closed_count": states.count("closed_span"),
        "open_count": states.count("open_span"),
        "point_count": states.count("event"),
        "orphan_count": states.count("orphan_end"),
        "total_response_length": sample.get("response_length", 0),
        "max_response_length": sample.get("response_length", 0),
        "items": items,
    }


def _items(events: Sequence[Mapping[str, Any]], row_end: float) -> list[dict[str, Any]]:
    ends = {event["span_id"]: event for event in events if event["type"] == "span_end" and "span_id" in event}
    starts = {event["span_id"]: event for event in events if event["type"] == "span_start"}
    items = []
    for event in events:
        is_end = event["type"] == "span_end"
        # The item of its start shows this end.
        if is_end and event.get("span_id") in starts:
            continue
        end = ends.get(event.get("span_id", "")) if event["type"] == "span_start" else None
        state = {"event": "event", "span_end": "orphan_end"}.get(
            event["type"], "open_span" if end is None else "closed_span"
        )
        parents = list(_parents(event, starts))
        items.append(
            {
                "state": state,
                "name": _PD_PREFIX.get(event["name"], "") + event["name"],
                "start_ts": event["ts"],
                "end_ts": end["ts"] if end else None,
                "display_end_ts": end["ts"] if end else event["ts"],
                "attempt": event.get("attempt", 0),
                "span_id": event.get("span_id"),
                "parent_span_id": event.get("parent_span_id"),
                "parent_name": parents[0]["name"] if parents else None,
                # An event is drawn in the lane of its span.
                "lane": max(0, len(parents) - (event["type"] == "event")),
                "attrs": {
                    "start_attrs": {} if is_end else event.get("attrs", {}),
                    "end_attrs": (event if is_end else end or {}).get("attrs", {}),
                },
            }
        )
    for item in items:
        if item["state"] == "open_span":
            item["display_end_ts"], item["clipped_by"] = _clip(item, items, row_end)
    return items


def _parents(event: Mapping[str, Any], starts: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Innermost first."""
    # A damaged trace may contain a cycle.
    seen: set[str] = set()
    parent = starts.get(event.get("parent_span_id") or "")
    while parent is not None and parent["span_id"] not in seen:
        seen.add(parent["span_id"])
        yield parent
        parent = starts.get(parent.get("parent_span_id") or "")


def _clip(item: Mapping[str, Any], items: Sequence[Mapping[str, Any]], row_end: float) -> tuple[float, str]:
    """(end on the screen, reason) of a span that was never closed."""
    begin, parent = item["start_ts"], item["parent_span_id"]
    candidates = [(row_end, "end of the row")]
    for other in items:
        if other["span_id"] is None or other is item:
            continue
        if other["parent_span_id"] == parent and other["start_ts"] > begin:
            candidates.append((other["start_ts"], f"next: {other['name']}"))
        if other["span_id"] == parent and other["end_ts"] is not None:
            candidates.append((other["end_ts"], f"end of {other['name']}"))
    return min(candidates)


if __name__ == "__main__":
    sys.exit(main())
