from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from slime.data import rows
from slime.data.sample import Sample, iter_samples
from slime.rollout import source_state
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, make_data_source, pop_first
from slime.rollout.source_state import fingerprint
from slime.utils.errors import DataError
from tests.unit.rollout.fake_engine import make_args


@pytest.fixture
def args(tmp_path, tiny_task):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "label": i}) + "\n" for i in range(5)))
    directory = str(tmp_path / "state")
    return make_args(tiny_task.model, 0, prompt_data=str(path), save=directory, load=directory)


def prompts(groups):
    return [int(group[0].prompt) for group in groups]


def test_numbers_of_groups_and_samples_increase_over_epochs(args):
    source = RolloutDataSource(args)
    groups = source.get_samples(3) + source.get_samples(4)
    assert prompts(groups) == [0, 1, 2, 3, 4, 0, 1]
    assert [s.group_index for s in iter_samples(groups)] == [i // 2 for i in range(14)]
    assert [s.index for s in iter_samples(groups)] == list(range(14))
    assert (source.epoch_id, source.sample_offset) == (1, 2)
    groups[0][0].metadata["changed"] = 1
    assert groups[0][1].metadata == {}


def test_one_draw_may_span_several_epochs(args):
    source = RolloutDataSource(args)
    assert prompts(source.get_samples(13)) == [0, 1, 2, 3, 4] * 2 + [0, 1, 2]
    assert (source.epoch_id, len(source)) == (2, 5)


def test_every_epoch_is_shuffled_anew_and_holds_every_prompt_once(args):
    args.rollout_shuffle = True
    drawn = prompts(RolloutDataSource(args).get_samples(10))
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))
    assert drawn[:5] != drawn[5:]
    assert drawn == prompts(RolloutDataSource(args).get_samples(10))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_restart_continues_as_if_there_had_been_none(args, shuffle):
    args.rollout_shuffle = shuffle
    without = RolloutDataSourceWithBuffer(args)
    expected = [without.get_samples(3) for _ in range(4)]
    first = RolloutDataSourceWithBuffer(args)
    for _ in range(2):
        first.get_samples(3)
    first.update_metadata({"seen": [1, 2]})
    first.save(1)
    second = RolloutDataSourceWithBuffer(args)
    second.load(1)
    continued = [second.get_samples(3) for _ in range(2)]
    assert [[s.to_dict() for s in iter_samples(g)] for g in continued] == [
        [s.to_dict() for s in iter_samples(g)] for g in expected[2:]
    ]
    assert second.get_metadata() == {"seen": [1, 2]}


@pytest.mark.parametrize("attached", [None, "tensor", "tuple"])
def test_returned_groups_survive_a_restart_whatever_they_hold(args, attached):
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    value = {"tensor": torch.arange(3), "tuple": (1, 2)}.get(attached)
    groups[0][0].teacher_log_probs = value
    groups[0][1] = [groups[0][1], Sample(index=99, status=Sample.Status.ABORTED)]
    source.add_samples(groups)
    source.save(0)
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    assert again.get_buffer_length() == 2
    restored = again.get_samples(3)
    assert [s.index for s in iter_samples(restored)] == [0, 1, 99, 2, 3, 4, 5]
    assert restored[0][1][1].status is Sample.Status.ABORTED
    held = restored[0][0].teacher_log_probs
    assert torch.equal(held, value) if attached == "tensor" else held == value


def test_a_missing_state_starts_over_with_a_warning_and_a_broken_one_is_named(args, tmp_path, caplog):
    source = RolloutDataSourceWithBuffer(args)
    source.load(7)
    assert source.sample_offset == 0
    assert "global_dataset_state_dict_7" in caplog.text
    directory = tmp_path / "state" / "rollout"
    directory.mkdir(parents=True)
    (directory / "global_dataset_state_dict_8.json").write_text("{")
    with pytest.raises(DataError, match=r"state_dict_8\.json"):
        source.load(8)
    args.strict_resume = True
    with pytest.raises(DataError, match=r"--strict-resume: .*state_dict_7\.json"):
        source.load(7)


def test_saving_leaves_no_temporary_file(args, tmp_path):
    RolloutDataSourceWithBuffer(args).save(3)
    assert [p.name for p in (tmp_path / "state" / "rollout").iterdir()] == ["global_dataset_state_dict_3.json"]


def test_returned_groups_are_drawn_before_new_prompts(args):
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    source.add_samples([])
    source.add_samples(groups[1:])
    assert prompts(source.get_samples(1)) == [1]
    assert prompts(source.get_samples(3)) == [2, 3, 4]


def test_flat_samples_are_grouped_again_and_wrong_sizes_refused(args):
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    source.add_samples(list(iter_samples(groups)))
    assert source.buffer == groups
    source.add_samples([Sample(prompt="9")])
    assert [len(group) for group in source.buffer] == [2, 2, 2]
    with pytest.raises(DataError, match="a group of 1 samples"):
        source.add_samples([[Sample()]])
    with pytest.raises(DataError, match="str"):
        source.add_samples(["x"])


def test_a_buffer_filter_may_be_a_function_or_an_overridden_method(args, tmp_path):
    hook = tmp_path / "hook.py"
    hook.write_text("def last(args, rollout_id, buffer, num_samples):\n    return [buffer[-1]]\n")
    args.buffer_filter_path = f"{hook}:last"
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert prompts(source.get_samples(2)) == [2, 3]
    assert prompts(source.buffer) == [0, 1], "what a filter returns leaves the buffer, whether it removed it or not"

    class Newest(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, num_samples):
            return buffer[-num_samples:]

    source = Newest(args)
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(1)) == [2]


def test_without_a_dataset_prompts_are_blank_and_a_read_only_source_takes_nothing_back(args):
    args.rollout_global_dataset = False
    source = RolloutDataSource(args=args)
    assert [s.prompt for s in iter_samples(source.get_samples(2))] == [""] * 4
    assert len(source) == 0
    with pytest.raises(RuntimeError, match="RolloutDataSource is read-only"):
        source.add_samples([])


def test_a_dataset_can_be_given(args):
    dataset = RolloutDataSource(args).dataset
    args.prompt_data = None
    assert prompts(RolloutDataSource(dataset, args).get_samples(1)) == [0]


def test_pop_first_removes_what_it_returns():
    buffer = [[Sample(index=i)] for i in range(3)]
    first = buffer[0]
    assert pop_first(None, None, buffer, 1) == [first]
    assert len(buffer) == 2
    assert len(pop_first(None, None, buffer, 9)) == 2
    assert buffer == []


class OfADataset(RolloutDataSourceWithBuffer):
    def __init__(self, dataset, args):
        super().__init__(dataset, args)


class OfNothing:
    pass


def test_a_users_source_is_made_in_the_way_it_wants(tiny_task):
    args = make_args(tiny_task.model, 1, prompt_data=tiny_task.train, rollout_shuffle=True)
    theirs, ours = make_data_source(OfADataset, args), make_data_source(RolloutDataSourceWithBuffer, args)
    assert [g[0].prompt for g in theirs.get_samples(5)] == [g[0].prompt for g in ours.get_samples(5)]
    assert make_data_source(OfNothing, args).args is args


@pytest.mark.parametrize("value", [1, (1, 2)])  # as JSON, and as what JSON would change
def test_a_state_has_the_usual_permissions_and_a_failed_write_leaves_the_old_one(tmp_path, value, monkeypatch):
    path = source_state.state_path(str(tmp_path), 3)
    source_state.write_state(path, {"value": value})
    (file,) = path.parent.iterdir()
    (tmp_path / "any").touch()
    assert file.stat().st_mode == (tmp_path / "any").stat().st_mode

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        source_state.write_state(path, {"value": value})
    assert list(path.parent.iterdir()) == [file]
    assert source_state.read_state(path) == {"value": value}


@pytest.mark.parametrize(("suffix", "content"), [(".json", b"{"), (".json", b"\xff"), (".pt", b""), (".pt", b"PK\x03")])
def test_a_damaged_state_is_named(tmp_path, suffix, content):
    path = source_state.state_path(str(tmp_path), 3)
    path.parent.mkdir()
    path.with_suffix(suffix).write_bytes(content)
    with pytest.raises(DataError, match=rf"state_dict_3\{suffix}: .*delete it to start from the first prompt"):
        source_state.read_state(path)


# --- sources and filters as users write them


def test_the_first_parameter_is_args_and_the_other_forms_work():
    assert list(inspect.signature(RolloutDataSource.__init__).parameters)[:2] == ["self", "args"]
    assert list(inspect.signature(RolloutDataSourceWithBuffer.__init__).parameters)[:2] == ["self", "args"]


@pytest.mark.parametrize("kind", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_a_source_is_made_in_every_form_of_the_contract(args, kind):
    dataset = kind(args).dataset
    made = [kind(args), kind(dataset, args), kind(args=args), kind(args=args, dataset=dataset), kind(args, dataset)]
    made += [kind(None, args)]
    assert all(prompts(source.get_samples(2)) == [0, 1] and source.args is args for source in made)


class WithoutSuper(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        self.mine = 1


class DrawsByItself(RolloutDataSource):
    def __init__(self, dataset, args):
        self.dataset = dataset

    def get_samples(self, num_samples):
        return [Sample(prompt=prompt) for prompt in self.dataset.sample(num_samples)]


def test_a_subclass_need_not_call_the_constructor_of_its_base(args):
    args.rollout_shuffle = True
    theirs, ours = make_data_source(WithoutSuper, args), make_data_source(RolloutDataSourceWithBuffer, args)
    drawn = [source.get_samples(7) for source in (theirs, ours)]
    assert prompts(drawn[0]) == prompts(drawn[1])
    theirs.add_samples(drawn[0][:2])
    theirs.update_metadata({"seen": 1})
    theirs.save(1)
    again = make_data_source(WithoutSuper, args)
    again.load(1)
    assert (again.get_buffer_length(), again.get_metadata(), len(again)) == (2, {"seen": 1}, 5)
    expected = drawn[0][:2] + ours.get_samples(1)
    assert prompts(again.get_samples(3)) == prompts(expected)
    assert WithoutSuper.epoch_id == 0, "counters belong to the object"
    assert make_data_source(WithoutSuper, args).buffer == []


def test_a_source_may_draw_prompts_from_its_dataset(args):
    source = make_data_source(DrawsByItself, args)
    assert [sample.prompt for sample in source.get_samples(6)] == ["0", "1", "2", "3", "4", "0"]


def best_samples(args, buffer, n):
    return sorted(buffer, key=lambda s: s.reward, reverse=True)[:n]


def best_groups(args, buffer, n):
    return sorted(buffer, key=lambda group: max(s.reward for s in group), reverse=True)[:n]


def best_samples_in_place(args, rollout_id, buffer, num_samples):
    buffer.sort(key=lambda s: -s.reward)
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


@pytest.mark.parametrize("name", ["best_samples", "best_groups", "best_samples_in_place"])
@pytest.mark.parametrize("is_method", [False, True])
def test_a_buffer_filter_may_see_samples_or_groups(args, name, is_method):
    function = globals()[name]
    kind = RolloutDataSourceWithBuffer
    if is_method:

        class kind(RolloutDataSourceWithBuffer):
            def buffer_filter(self, args, buffer, n):
                return function(args, None, buffer, n) if name.endswith("place") else function(args, buffer, n)

    else:
        args.buffer_filter_path = f"{__file__}:{name}"
    source = kind(args)
    groups = source.get_samples(4)
    for sample, reward in zip(iter_samples(groups), [0, 1, 5, 0, 0, 0, 4, 4], strict=True):
        sample.reward = reward
    source.add_samples(groups)
    assert prompts(source.get_samples(2)) == [1, 3]
    assert prompts(source.buffer) == [0, 2]
    assert prompts(source.get_samples(3)) == [0, 2, 4]


def broken_filter(args, buffer, n):
    return buffer.nothing


def test_a_filter_that_works_on_neither_shows_its_own_error(args):
    args.buffer_filter_path = f"{__file__}:broken_filter"
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(1))
    with pytest.raises(AttributeError, match="nothing"):
        source.get_samples(1)
    assert source.get_buffer_length() == 1


# --- a run that is resumed with other data


def shuffled_file(args):
    path = Path(args.prompt_data)
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def shortened_file(args):
    path = Path(args.prompt_data)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def flags(**values):
    def change(args):
        vars(args).update(values)

    return change


CHANGES = {
    "content of --prompt-data": shuffled_file,
    "content of --prompt-data (it had": shortened_file,
    "--rollout-seed (it was 42, now it is 43)": flags(rollout_seed=43),
    "--n-samples-per-prompt (it was 2, now it is 4)": flags(n_samples_per_prompt=4),
    "--rollout-shuffle (it was True, now it is False)": flags(rollout_shuffle=False),
}


@pytest.mark.parametrize("fragment", CHANGES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_run_is_not_resumed_with_other_data_unless_it_is_meant(args, fragment, is_stream, caplog):
    args.rollout_shuffle, args.streaming_data = True, is_stream
    first = RolloutDataSourceWithBuffer(args)
    first.get_samples(3)
    first.save(0)
    same = RolloutDataSourceWithBuffer(args)
    same.load(0)
    assert same.data_changes is None
    CHANGES[fragment](args)
    other = RolloutDataSourceWithBuffer(args)
    with pytest.raises(DataError, match=rf"state_dict_0: .*{re.escape(fragment)}.*--accept-changed-data"):
        other.load(0)
    args.accept_changed_data = True
    other.load(0)
    assert (other.sample_offset, len(other.get_samples(2))) == (3, 2)
    assert fragment in other.data_changes


def test_a_slice_is_part_of_the_data_and_a_file_may_move(args, tmp_path):
    source = RolloutDataSource(args)
    source.save(0)
    moved = tmp_path / "moved.jsonl"
    Path(args.prompt_data).rename(moved)
    args.prompt_data = str(moved)
    RolloutDataSource(args).load(0)
    args.prompt_data = f"{moved}@[1:]"
    with pytest.raises(DataError, match=r"slice of --prompt-data \(it was None, now it is \[1, None\]\)"):
        RolloutDataSource(args).load(0)


def test_what_does_not_decide_the_order_is_a_warning(args, caplog):
    args.seed = 1
    RolloutDataSource(args).save(0)
    args.seed, args.rollout_seed = 2, 43
    source = RolloutDataSource(args)
    source.load(0)
    assert "--seed (it was 1, now it is 2), --rollout-seed (it was 42, now it is 43)" in caplog.text
    assert source.data_changes is None


def test_a_state_of_an_earlier_version_says_that_it_cannot_tell(args):
    RolloutDataSource(args).save(0)
    (file,) = Path(args.save, "rollout").iterdir()
    state = json.loads(file.read_text())
    del state["data"]
    file.write_text(json.dumps(state))
    source = RolloutDataSource(args)
    source.load(0)
    assert "no fingerprint" in source.data_changes


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None])
@pytest.mark.parametrize("name", ["sample_offset", "epoch_id", "sample_group_index", "sample_index"])
def test_counters_of_a_state_are_whole_numbers_from_0_on(args, name, value):
    RolloutDataSource(args).save(0)
    (file,) = Path(args.save, "rollout").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(DataError, match=rf"state_dict_0: {name} is {value!r}, and it must be a whole number"):
        RolloutDataSource(args).load(0)


def test_the_fingerprint_is_of_the_file_that_was_read_at_the_start(args):
    source = RolloutDataSource(args)
    content = Path(args.prompt_data).read_text()
    Path(args.prompt_data).write_text(content + content)
    source.save(0)
    with pytest.raises(DataError, match="the content of --prompt-data"):
        RolloutDataSource(args).load(0)


class OtherFormat(RolloutDataSource):
    """A user's: its prompts come from a place that only it knows."""

    def __init__(self, args):
        self.rows = ["a", "b"]

    def get_samples(self, num_samples):
        return [[Sample(prompt=prompt)] for prompt in self.rows[:num_samples]]


def test_a_source_whose_prompt_data_is_no_file_saves_its_state_and_continues(args):
    args.prompt_data = "lab/prompts"
    source = make_data_source(OtherFormat, args)
    source.sample_offset = 1
    source.save(0)
    again = make_data_source(OtherFormat, args)
    again.load(0)
    assert again.sample_offset == 1
    assert "no fingerprint" in again.data_changes


def test_a_large_file_is_read_in_blocks_and_its_ends_and_size_count(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 16)
    monkeypatch.setattr(rows, "_NUM_BLOCKS", 4)
    path = tmp_path / "rows.jsonl"
    args = make_args("", 0, prompt_data=str(path))

    def digest(content):
        path.write_bytes(content)
        return fingerprint(vars(args), None)["digest"]

    for size in (0, 5, 16, 63, 64, 80, 1000):
        content = bytes(i % 251 for i in range(size))
        known = digest(content)
        assert known == digest(content)
        if size:
            assert digest(content[:-1] + b"\xff") != known
            assert digest(b"\xff" + content[1:]) != known
        for place in range(size if size <= 64 else 0):
            assert digest(content[:place] + b"\xff" + content[place + 1 :]) != known
