"""Spans of samples: nesting, concurrency, processes, and that they never get in the way."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from slime.data.sample import Sample
from slime.observability.metric_utils import request_metrics
from slime.observability.trace_utils import (
    TRACE_CHILDREN_KEY,
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.rollout.failures import Attempts
from slime.utils.net import free_port
from tests.programs import run_program
from tools.trace_timeline_viewer import perfetto_events, timeline_rows

VIEWER = Path(__file__).parents[3] / "tools" / "trace_timeline_viewer.py"


def events(sample: Sample) -> list[dict[str, Any]]:
    return sample.trace["events"]  # type: ignore[attr-defined]


def of(sample: Sample, kind: str, name: str) -> dict[str, Any]:
    (found,) = [event for event in events(sample) if event["type"] == kind and event["name"] == name]
    return found


def test_a_span_inside_another_names_it_as_its_parent() -> None:
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "outer", attrs={"size": 2}):
        trace_event(sample, "between", attrs={"x": 1})
        with trace_span(sample, "inner") as span:
            span.set("tokens", 5)
    outer, inner = of(sample, "span_start", "outer"), of(sample, "span_start", "inner")
    assert "parent_span_id" not in outer
    assert inner["parent_span_id"] == of(sample, "event", "between")["parent_span_id"] == outer["span_id"]
    assert outer["attrs"] == {"size": 2}
    end = of(sample, "span_end", "inner")
    assert end["attrs"] == {"tokens": 5}
    assert (end["sample_id"], end["group_id"], end["attempt"]) == (3, 1, 0)
    assert "parent_span_id" not in end
    json.dumps(sample.trace)  # type: ignore[attr-defined]


def test_a_span_over_a_group_is_written_to_every_member_at_the_same_time() -> None:
    group = [Sample(index=0), [Sample(index=1), Sample(index=2)]]
    with trace_span(group, "group"):
        pass
    members = [group[0], *group[1]]  # type: ignore[misc]
    assert len({of(member, "span_start", "group")["ts"] for member in members}) == 1
    assert len({of(member, "span_start", "group")["span_id"] for member in members}) == 3


def test_concurrent_samples_do_not_become_each_others_parents() -> None:
    samples = [Sample(index=i) for i in range(3)]

    async def one(sample: Sample) -> None:
        with trace_span(sample, "outer"):
            await asyncio.sleep(0)
            with trace_span(sample, "inner"):
                await asyncio.sleep(0)

    async def all_of_them() -> None:
        with trace_span(samples, "all"):
            await asyncio.gather(*(one(sample) for sample in samples))

    asyncio.run(all_of_them())
    for sample in samples:
        assert of(sample, "span_start", "outer")["parent_span_id"] == of(sample, "span_start", "all")["span_id"]
        assert of(sample, "span_start", "inner")["parent_span_id"] == of(sample, "span_start", "outer")["span_id"]


def test_an_exception_is_noted_and_goes_on() -> None:
    sample = Sample()
    with pytest.raises(ValueError, match="too long"), trace_span(sample, "tool"):
        raise ValueError("too long")
    assert of(sample, "span_end", "tool")["attrs"] == {"error_type": "ValueError", "error_message": "too long"}


def test_attributes_that_come_late_still_reach_the_end_of_the_span() -> None:
    sample = Sample()
    with trace_span(sample, "request") as span:
        pass
    span.update(
        {"tokens": 7, TRACE_CHILDREN_KEY: [{"type": "span", "name": "part", "start_offset": 1, "end_offset": 3}]}
    )
    assert of(sample, "span_end", "request")["attrs"] == {"tokens": 7}
    start, end = of(sample, "span_start", "part"), of(sample, "span_end", "part")
    assert end["ts"] - start["ts"] == pytest.approx(2, abs=1e-6)
    assert start["parent_span_id"] == of(sample, "span_start", "request")["span_id"]


def test_what_cannot_carry_a_trace_is_left_alone() -> None:
    for target in (None, [], 3, "text", {"a": 1}):
        with trace_span(target, "nothing") as span:
            span.update({"a": 1})
    assert target == {"a": 1}


def test_a_trace_that_cannot_be_written_does_not_reach_the_caller() -> None:
    sample = Sample()
    sample.trace = {"events": None}  # type: ignore[attr-defined]
    with trace_span(sample, "broken") as span:
        span.set("x", 1)
    trace_event(sample, "broken too")
    with trace_span(Sample(), "around"):
        trace_event(sample, "broken inside of another")


def test_a_trace_goes_on_in_another_process() -> None:
    sample = Sample(index=4)
    with trace_span(sample, "here"):
        payload = json.loads(json.dumps(export_trace(bind_trace(sample))))
    handle = import_trace(payload)
    with trace_span(handle, "there"):
        pass
    start = handle.carrier["events"][0]
    assert start["trace_id"] == bind_trace(sample).trace_id
    assert start["parent_span_id"] == of(sample, "span_start", "here")["span_id"]


def test_attempts_are_counted() -> None:
    sample = Sample()
    with trace_span(sample, "first"):
        pass
    trace_next_attempt(sample, attrs={"why": "timeout"})
    with trace_span(sample, "second"):
        pass
    assert [of(sample, "span_start", name)["attempt"] for name in ("first", "second")] == [0, 1]
    assert of(sample, "event", "attempt_start")["attrs"] == {"why": "timeout"}


def test_a_decorated_function_finds_its_sample(caplog: pytest.LogCaptureFixture) -> None:
    @trace_function("named", target="sample", attrs_getter=lambda sample, n: {"n": n})
    def named(sample: Sample, n: int) -> int:
        return n

    @trace_function("guessed")
    async def guessed(text: str, sample: Sample) -> str:
        return inside(text)

    @trace_function("inside")
    def inside(text: str) -> str:
        return text

    @trace_function("missing", target="other")
    def missing(sample: Sample) -> None:
        return None

    @trace_function("failing", target_getter=lambda sample: sample.nothing)
    def failing(sample: Sample) -> int:
        return 1

    sample = Sample()
    assert named(sample, 2) == 2
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(guessed("a", sample)) == "a"
        asyncio.run(guessed("a", sample))
        missing(sample)
    assert failing(sample) == 1
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["trace guessed", "trace missing"]
    assert of(sample, "span_start", "named")["attrs"] == {"n": 2}
    starts = [event["name"] for event in events(sample) if event["type"] == "span_start"]
    assert starts == ["named", "guessed", "inside", "guessed", "inside"]
    assert named.__name__ == "named"


META = {
    "id": "r1",
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "cached_tokens": None,
    "e2e_latency": 0.5,
    "finish_reason": {"type": "stop"},
    "pd_prefill_bootstrap_duration": 0.1,
    "pd_prefill_forward_duration": 0.2,
    "pd_decode_forward_duration": 0.4,
    "pd_prefill_transfer_speed_gb_s": 3.0,
}


def test_phases_of_separated_engines_become_spans_and_no_attributes() -> None:
    sample = Sample()
    with trace_span(sample, "sglang_generate") as span:
        span.update(build_sglang_meta_trace_attrs(META))
    attrs = of(sample, "span_end", "sglang_generate")["attrs"]
    expected = {"prompt_tokens": 10, "completion_tokens": 4, "e2e_latency": 0.5}
    assert attrs == expected | {"finish_reason": "stop", "sglang_request_id": "r1"}
    start = of(sample, "span_start", "sglang_generate")["ts"]
    forward, decode = (of(sample, "span_start", f"sglang_pd_{name}") for name in ("prefill_forward", "decode"))
    assert forward["ts"] - start == pytest.approx(0.1, abs=1e-5)
    assert decode["ts"] - start == pytest.approx(0.3, abs=1e-5)
    metrics = request_metrics([sample, sample])  # two samples of one execution share a trace: it counts once
    assert metrics["request/count"] == metrics["request/profiled_count"] == 1
    assert metrics["request/e2e_latency/mean"] == 0.5
    assert metrics["prefill/forward_duration/max"] == pytest.approx(0.2)
    assert metrics["decode/forward_duration/min"] == pytest.approx(0.4)
    assert metrics["prefill/transfer_speed_gb_s/mean"] == 3.0
    assert "prefill/duration/mean" not in metrics
    ended = of(sample, "span_end", "sglang_pd_prefill_forward")["attrs"]
    assert ended["pd_prefill_forward_duration"] == 0.2


@pytest.mark.parametrize("prefix", ["pd_", "pd_prefill_"])
def test_speed_and_size_of_the_transfer_are_read_under_both_of_their_names(prefix: str) -> None:
    sample = Sample()
    meta = {f"{prefix}transfer_speed_gb_s": 3.0, f"{prefix}transfer_total_mb": 12.0, "pd_prefill_retry_count": 1}
    with trace_span(sample, "sglang_generate") as span:
        span.update(build_sglang_meta_trace_attrs(meta))
    attrs = of(sample, "event", "sglang_pd_summary")["attrs"]
    assert attrs == {"pd_transfer_speed_gb_s": 3.0, "pd_transfer_total_mb": 12.0, "pd_prefill_retry_count": 1}
    metrics = request_metrics([sample])
    found = [metrics[f"prefill/{name}/mean"] for name in ("transfer_speed_gb_s", "transfer_total_mb", "retry_count")]
    assert found == [3.0, 12.0, 1.0]


def test_requests_of_streams_count_and_nonsense_does_not() -> None:
    sample = Sample()
    for name, latency in (("sglang_generate_stream", 2.0), ("sglang_generate", float("nan")), ("other", 9.0)):
        with trace_span(sample, name) as span:
            span.update({"e2e_latency": latency, "queue_time": True})
    metrics = request_metrics([sample])
    assert (metrics["request/count"], metrics["request/profiled_count"]) == (2, 1)
    assert metrics["request/e2e_latency/max"] == 2.0
    assert not any("queue_time" in name for name in metrics)


def open_span_sample() -> Sample:
    """``lost`` inside of ``outer`` never ended."""
    sample = Sample(index=5, group_index=2, status=Sample.Status.COMPLETED, reward=1.0)
    with trace_span(sample, "outer"), trace_span(sample, "lost"):
        pass
    sample.trace["events"] = [e for e in events(sample) if not (e["type"] == "span_end" and e["name"] == "lost")]  # type: ignore[attr-defined]
    for place, event in enumerate(events(sample)):
        event["ts"] = 100.0 + place
    return sample


def test_a_timeline_draws_open_spans_to_where_they_must_have_ended() -> None:
    (row,) = timeline_rows([open_span_sample().to_dict(), Sample(index=6).to_dict()])
    assert (row["sample_index"], row["group_index"], row["lane_count"]) == (5, 2, 2)
    lost = next(item for item in row["items"] if item["name"] == "lost")
    assert (lost["state"], lost["end_ts"], lost["display_end_ts"]) == ("open_span", None, 102.0)
    assert lost["clipped_by"] in ("end of outer", "end of the row")
    (meta_process, meta_thread, outer, drawn) = perfetto_events([open_span_sample().to_dict()])
    assert (meta_process["ph"], meta_thread["ph"]) == ("M", "M")
    assert (outer["ts"], outer["dur"]) == (0, 2e6)
    assert (drawn["name"], drawn["ts"], drawn["dur"]) == ("lost", 1e6, 1e6)


def test_the_viewer_reads_a_dump_and_writes_page_cache_and_perfetto_file(tmp_path: Path) -> None:
    sample = Sample(index=1)
    with trace_span(sample, "sglang_generate"):
        pass
    dump = tmp_path / "3.pt"
    torch.save({"rollout_id": 3, "samples": [sample.to_dict()]}, dump)
    done = run_program(VIEWER, dump, "--no-serve", "--perfetto", tmp_path / "p.json")
    done.check_returncode()
    assert "samples: 1" in done.stdout
    cache = json.loads((tmp_path / "3.trace_timeline_cache.json").read_text())
    assert cache["rows"][0]["lane_count"] == 1
    assert not [item for item in cache["rows"][0]["items"] if item["name"].startswith("[")]
    assert "3.trace_timeline_cache.json" in (tmp_path / "3.trace_timeline_viewer.html").read_text()
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"][-1]["name"] == "sglang_generate"
    missing = run_program(VIEWER, tmp_path / "no.pt")
    assert missing.returncode == 1
    assert "no.pt" in missing.stderr


class _RunsCode:
    """An object that a foreign dump may hold: loading it calls a function with arguments."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_viewer_runs_no_code_of_a_dump(tmp_path: Path) -> None:
    made = tmp_path / "made"
    dump = tmp_path / "3.pt"
    sample = open_span_sample()
    sample.metadata = {"theirs": _RunsCode(made), "numbers": torch.ones(2, dtype=torch.bfloat16)}
    torch.save({"rollout_id": 3, "samples": [sample.to_dict(), sample]}, dump)
    done = run_program(VIEWER, dump, "--no-serve")
    done.check_returncode()
    assert "samples: 2" in done.stdout
    assert "has objects of pathlib.Path, which are left empty" in done.stderr
    dump.write_bytes(pickle.dumps(_RunsCode(made)))  # no archive: torch reads it as it did before version 1.6
    assert run_program(VIEWER, dump, "--rebuild", "--no-serve").returncode != 0
    assert not made.exists()


def test_the_viewer_serves_its_two_files_and_no_other_under_the_names_of_this_machine(tmp_path: Path) -> None:
    dump = tmp_path / "3.pt"
    torch.save({"rollout_id": 3, "samples": [open_span_sample().to_dict()]}, dump)
    (tmp_path / "secret.txt").touch()
    address = f"http://127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [sys.executable, VIEWER, dump, "--port", address.rpartition(":")[2]], stdout=subprocess.DEVNULL
    ) as viewer:
        try:
            transport = httpx.HTTPTransport(retries=10)  # with growing pauses: until it listens
            with httpx.Client(base_url=address, transport=transport, timeout=600) as client:
                page = "/3.trace_timeline_viewer.html"
                assert "3.trace_timeline_cache.json" in client.get(page).text == client.get("/").text
                assert client.get("/3.trace_timeline_cache.json").json()["sample_count"] == 1
                assert client.get("/secret.txt").status_code == 404
                assert client.get(page, headers={"Host": "rebound.example"}).status_code == 400
        finally:
            viewer.kill()


def test_a_repeated_generation_goes_on_in_the_same_trace() -> None:
    sample = Sample(index=2)
    calls = []

    async def attempt() -> str:
        with trace_span(sample, "sglang_generate"):
            calls.append(sample)
            if len(calls) < 3:
                raise KeyError("a tool is away")
        return "done"

    async def generate() -> Any:
        with trace_span(sample, "generate_and_rm"):
            for one in Attempts([sample], retries=2, what="generate"):
                with one:
                    return await attempt()

    assert asyncio.run(generate()) == "done"
    (row,) = timeline_rows([sample.to_dict()])
    assert (row["open_count"], row["orphan_count"]) == (0, 0)
    spans = [item for item in row["items"] if item["name"] == "sglang_generate"]
    assert [span["attempt"] for span in spans] == [0, 1, 2]
    assert {span["parent_name"] for span in spans} == {"generate_and_rm"}
    assert spans[0]["attrs"]["end_attrs"]["error_type"] == "KeyError"
