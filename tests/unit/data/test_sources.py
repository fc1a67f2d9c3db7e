"""Several prompt sources with weights, and data sets of the package datasets: rows, shares, order and resume."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from slime.config.plan import plan_batch
from slime.config.plan.placement import read_layout
from slime.data import rows
from slime.data.rows import check_prompt_file, identity, read_file
from slime.data.sample import Sample
from slime.observability.rollout_metrics import log_rollout_data
from slime.rollout.data_source import RolloutDataSourceWithBuffer, make_data_source
from slime.utils.errors import ConfigError, DataError
from slime.utils.prompt_sources import PromptSource, absolute_source, format_sources, parse_sources
from tests.unit.config.tiny_command import make_command
from tests.unit.observability.test_rollout_log import settings
from tests.unit.rollout.fake_engine import make_args

datasets = pytest.importorskip("datasets", reason="pip install 'slime[datasets]'")

SIZES = {"a": 7, "b": 3, "c": 20}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    rows._from_hub.cache_clear()


def write(path: Path, name: str, size: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name}{i}", "label": i}) + "\n" for i in range(size)))
    return str(path)


@pytest.fixture
def args(tmp_path: Path, tiny_task: Any) -> Any:
    files = {name: write(tmp_path / f"{name}.jsonl", name, size) for name, size in SIZES.items()}
    value = f"a={files['a']}:2 b={files['b']} c={files['c']}:0.5"
    state = str(tmp_path / "state")
    return make_args(tiny_task.model, 0, prompt_data=value, save=state, load=state, rollout_shuffle=True)


def draw(source: Any, count: int) -> list[str]:
    return [str(group[0].prompt) for group in source.get_samples(count)]


# ---- the value of the flag


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data.jsonl", [("", "data.jsonl", 1)]),
        ("a=x.jsonl", [("a", "x.jsonl", 1)]),
        ("a=x.jsonl:3 b=y.parquet@[0:9]:0.5", [("a", "x.jsonl", 3), ("b", "y.parquet@[0:9]", 0.5)]),
        ("a=x.jsonl@[:9] b=org/set:main:test:2", [("a", "x.jsonl@[:9]", 1), ("b", "org/set:main:test", 2)]),
        ("data/day=3/x.jsonl", [("", "data/day=3/x.jsonl", 1)]),
    ],
)
def test_a_value_is_one_source_or_several_with_weights(text: str, expected: list[Any]) -> None:
    assert parse_sources(text) == [PromptSource(*source) for source in expected]


def test_an_existing_file_is_one_source_whatever_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=x.jsonl", "my data.jsonl"):
        write(tmp_path / name, "p", 1)
        assert parse_sources(f"{name}@[0:1]") == [PromptSource("", f"{name}@[0:1]")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a=x.jsonl:0", "a=x.jsonl:0: the weight 0 must be a number above 0"),
        ("a=x.jsonl:-1 b=y.jsonl", "the weight -1 must be a number above 0"),
        ("a=x.jsonl:nan", "the weight nan must be a number above 0"),
        ("a=x.jsonl:inf", "the weight inf must be a number above 0"),
        ("a=x.jsonl a=y.jsonl", "there are two sources named a"),
        ("x.jsonl y.jsonl", r"--prompt-data x.jsonl: several sources are written NAME=SOURCE\[:WEIGHT\]"),
    ],
)
def test_invalid_sources_are_one_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_sources(text)


def test_a_path_is_made_absolute_and_an_id_of_the_hub_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    same = ("org/name", "org/name@v1:main:test@[0:9]", "", "/x/y.jsonl")
    assert [absolute_source(path) for path in same] == list(same)
    assert absolute_source("x.jsonl@[0:9]") == f"{tmp_path}/x.jsonl@[0:9]"
    assert absolute_source("org/x.jsonl") == f"{tmp_path}/org/x.jsonl"
    assert absolute_source("org/local::test") == f"{tmp_path}/org/local::test"


def test_a_command_with_several_sources_is_checked_and_planned(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    paths = {name: write(tmp_path / f"{name}.jsonl", name, size) for name, size in SIZES.items()}
    words = ["--prompt-data", f"a={paths['a']}:3", f"b={paths['b']}@[1:]"]
    args = command.resolve(*words, without=("--prompt-data",))
    assert args.prompt_data == f"a={paths['a']}:3 b={paths['b']}@[1:]:1"
    plan = plan_batch(args, read_layout(args))
    assert plan.sources == (("a", paths["a"], 7, 0.75), ("b", f"{paths['b']}@[1:]", 2, 0.25))
    assert plan.num_prompts == 9


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a={dir}/a.jsonl", "b={dir}/gone.jsonl:2"], "--prompt-data {dir}/gone.jsonl: there is no such file"),
        (["a={dir}/a.jsonl", "b={dir}/empty.jsonl"], "--prompt-data {dir}/empty.jsonl: there is no row in it"),
        (["a={dir}/a.jsonl:x"], "{dir}/a.jsonl:x: prompt files must end in .jsonl or .parquet"),
        (["org/gone"], "org/gone: cannot be loaded as a data set of the Hub"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_before_anything_starts(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    command = make_command(tmp_path)
    write(tmp_path / "a.jsonl", "a", 20)
    (tmp_path / "empty.jsonl").touch()
    _, problems = command.run("--prompt-data", *words, without=("--prompt-data",))
    assert problem.replace("{dir}", str(command.directory)) in problems


# ---- shares, order, resume


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_source_has_its_share_and_the_order_that_it_has_alone(args: Any, is_stream: bool) -> None:
    args.streaming_data = is_stream
    drawn = draw(RolloutDataSourceWithBuffer(args), 210)
    for count in range(1, len(drawn) + 1):
        counts = Counter(prompt[0] for prompt in drawn[:count])
        assert all(abs(counts[name] - count * share / 7) <= 1 for name, share in (("a", 4), ("b", 2), ("c", 1)))
    for source in parse_sources(args.prompt_data):
        alone = RolloutDataSourceWithBuffer(Namespace(**vars(args) | {"prompt_data": source.path}))
        mine = [prompt for prompt in drawn if prompt[0] == source.name]
        assert mine == draw(alone, len(mine))


def test_the_order_depends_on_the_seed_and_not_on_the_number_of_prompts_per_draw(args: Any) -> None:
    expected = draw(RolloutDataSourceWithBuffer(args), 60)
    parts = RolloutDataSourceWithBuffer(args)
    assert list(itertools.chain(*(draw(parts, count) for count in (1, 9, 30, 20)))) == expected
    args.rollout_seed = 43
    assert draw(RolloutDataSourceWithBuffer(args), 60) != expected


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("before", [1, 5, 12, 13, 50])  # source b ends its first epochs after 11 and 22 draws
def test_an_interrupted_run_draws_what_an_uninterrupted_one_does(args: Any, before: int, is_stream: bool) -> None:
    args.streaming_data = is_stream
    whole = RolloutDataSourceWithBuffer(args)
    expected = [group[0].to_dict() for group in whole.get_samples(before + 60) if isinstance(group[0], Sample)]
    first = RolloutDataSourceWithBuffer(args)
    drawn = first.get_samples(before)
    first.save(0)
    first.get_samples(4)  # drawn after the checkpoint, and lost with the process
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    assert again.data_changes is None
    drawn += again.get_samples(60)
    assert [group[0].to_dict() for group in drawn if isinstance(group[0], Sample)] == expected
    assert {values["metadata"]["source_name"] for values in expected} <= set(SIZES)


def test_the_number_of_prompts_is_that_of_all_sources(args: Any) -> None:
    assert len(RolloutDataSourceWithBuffer(args)) == sum(SIZES.values())
    args.streaming_data = True
    assert len(RolloutDataSourceWithBuffer(args)) == 0


def weights(args: Any) -> None:
    args.prompt_data = args.prompt_data.replace(":2", ":3")


def fewer(args: Any) -> None:
    args.prompt_data = " ".join(args.prompt_data.split()[:2])


def edited(args: Any) -> None:
    path = Path(parse_sources(args.prompt_data)[1].path)
    path.write_text(path.read_text().replace("b1", "b9"))


def one(args: Any) -> None:
    args.prompt_data = parse_sources(args.prompt_data)[0].path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (weights, r"the weight of source a of --prompt-data \(it was 2.0, now it is 3.0\)"),
        (fewer, r"the sources of --prompt-data \(they were a, b, c, now they are a, b\)"),
        (edited, "the content of source b of --prompt-data"),
        (one, r"\(they were a, b, c, now they are one without a name\)"),
    ],
)
def test_a_run_is_not_resumed_with_other_sources_unless_it_is_meant(args: Any, change: Any, text: str) -> None:
    first = RolloutDataSourceWithBuffer(args)
    draw(first, 8)
    first.save(0)
    change(args)
    other = RolloutDataSourceWithBuffer(args)
    with pytest.raises(DataError, match=text):
        other.load(0)
    args.accept_changed_data = True
    other.load(0)
    assert len(draw(other, 8)) == 8


def test_a_class_that_takes_one_dataset_refuses_several_sources(args: Any) -> None:
    def maker(dataset: Any, args: Any) -> None: ...

    args.data_source_path = "mine.Source"
    with pytest.raises(DataError, match=r"several sources cannot be one Dataset, which --data-source-path mine.Source"):
        make_data_source(maker, args)


# ---- data sets


ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"level": i}} for i in range(10)]


def test_a_saved_data_set_has_the_rows_it_was_made_of_and_takes_slices(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert list(read_file(f"{tmp_path}/one")) == ROWS
    assert list(read_file(f"{tmp_path}/one@[2:5]")) == ROWS[2:5]
    assert list(read_file(f"{tmp_path}/one@[-3:]")) == ROWS[-3:]


def test_the_split_of_a_saved_data_set_is_train_or_the_named_one(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS[:6]), "test": datasets.Dataset.from_list(ROWS[6:])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    assert list(read_file(f"{tmp_path}/two")) == ROWS[:6]
    assert list(read_file(f"{tmp_path}/two::test")) == ROWS[6:]
    with pytest.raises(DataError, match=r"it has no split dev, but train, test: name one as .*/two::SPLIT"):
        list(read_file(f"{tmp_path}/two::dev"))


def test_a_folder_of_parquet_files_is_a_data_set_with_the_splits_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for part in range(2):
        part_rows = datasets.Dataset.from_list(ROWS[part * 4 : part * 4 + 4])
        part_rows.to_parquet(str(folder / f"train-0000{part}-of-00002.parquet"))
    datasets.Dataset.from_list(ROWS[8:]).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    assert list(read_file(f"{tmp_path}/set")) == ROWS[:8]
    assert list(read_file(f"{tmp_path}/set::test@[1:]")) == ROWS[9:]
    assert list(check_prompt_file("--prompt-data", f"{tmp_path}/set")) == []


def test_pictures_of_a_data_set_are_bytes_as_in_a_parquet_file(tmp_path: Path) -> None:
    image = datasets.Image().encode_example({"bytes": b"png", "path": None})
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"prompt": ["x"], "image": [image]}, features=features).save_to_disk(tmp_path / "p")
    assert list(read_file(f"{tmp_path}/p")) == [{"prompt": "x", "image": {"bytes": b"png", "path": None}}]


def test_a_data_set_of_the_hub_is_loaded_by_id_revision_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(path: str, **settings: Any) -> Any:
        calls.append((path, settings))
        return datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:1]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for _ in range(2):  # a server is asked once
        assert list(read_file("org/sums@v1:main:test")) == ROWS[:1]
    assert calls == [("org/sums", {"name": "main", "revision": "v1"})]
    assert list(read_file("org/sums@[8:]")) == ROWS[8:]


def test_the_identity_of_a_data_set_is_its_rows_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_NUM_ROWS", 4)
    for name, content in (("one", ROWS), ("same", ROWS), ("last", [*ROWS[:9], ROWS[0]]), ("less", ROWS[:9])):
        datasets.Dataset.from_list(content).save_to_disk(tmp_path / name)
    one, same, *others = (identity(f"{tmp_path}/{name}") for name in ("one", "same", "last", "less"))
    assert one == same
    assert one not in others
    assert identity(f"{tmp_path}/nothing") is None


def test_a_mixture_of_a_file_and_a_data_set_is_drawn_and_resumed(tmp_path: Path, tiny_task: Any) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    value = f"file={write(tmp_path / 'x.jsonl', 'x', 3)} set={tmp_path}/set@[:4]:2"
    state = str(tmp_path / "state")
    args = make_args(tiny_task.model, 0, prompt_data=value, save=state, load=state)
    source = RolloutDataSourceWithBuffer(args)
    assert draw(source, 6) == ["0+1=", "x0", "1+1=", "2+1=", "x1", "3+1="]
    source.save(0)
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    assert draw(again, 3) == ["0+1=", "x2", "1+1="]


def test_each_source_has_its_own_mean_reward() -> None:
    def sample(name: str, reward: float) -> Sample:
        return Sample(metadata={"source_name": name}, reward=reward, response_length=1, tokens=[1, 2])

    samples = [sample("a", 1.0), sample("b", 0.0), sample("a", 0.5), sample("other", 7.0)]
    args = settings(prompt_data="a=x.jsonl:2 b=y.jsonl")
    metrics = log_rollout_data(0, args, samples, None, 1.0)
    of_sources = {name: value for name, value in metrics.items() if name.startswith("rollout/source/")}
    assert of_sources == {"rollout/source/a/raw_reward": 0.75, "rollout/source/b/raw_reward": 0.0}
    assert not any("source" in name for name in log_rollout_data(0, settings(), samples, None, 1.0))


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (problem,) = check_prompt_file("--prompt-data", str(tmp_path))
    assert "pip install 'slime[datasets]'" in problem


def test_paths_with_spaces_and_weights_survive_being_made_absolute(tmp_path, monkeypatch):
    (folder := tmp_path / "my data" / "a folder").mkdir(parents=True)
    assert parse_sources(f"{folder}::test") == [PromptSource("", f"{folder}::test")]
    monkeypatch.chdir(folder)
    sources = [PromptSource("a", f"{folder}/x.jsonl", 1234567), PromptSource("b", absolute_source("y.jsonl@[:9]"))]
    assert parse_sources(format_sources(sources)) == sources
