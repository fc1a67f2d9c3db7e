from __future__ import annotations

import json
import random
import re
from datetime import datetime
from decimal import Decimal

import pytest

from slime.data.processing import load_tokenizer
from slime.data.prompts import Dataset, filter_long_prompt
from slime.data.rows import check_prompt_file, read_file
from slime.data.sample import Sample
from slime.rollout.engine_request import prepare_prompt_ids
from slime.rollout.failures import fresh_copy
from slime.utils.errors import DataError
from slime.utils.prompt_sources import parse_path


@pytest.fixture
def rows_file(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


@pytest.fixture
def tokenizer(tiny_task):
    return load_tokenizer(tiny_task.model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl@[1:5]", ("a.jsonl", slice(1, 5))),
        ("a.jsonl@[:-2]", ("a.jsonl", slice(None, -2))),
        ("a.jsonl@[:]", ("a.jsonl", slice(None, None))),
        ("a.jsonl@[1]", ("a.jsonl@[1]", None)),
        ("a.jsonl@[-:2]", ("a.jsonl@[-:2]", None)),
        ("a@[1:2].jsonl", ("a@[1:2].jsonl", None)),
    ],
)
def test_a_path_may_end_in_a_slice(text, expected):
    assert parse_path(text) == expected


@pytest.mark.parametrize("part", ["[2:5]", "[:3]", "[7:]", "[-3:]", "[:-8]", "[-100:2]", "[3:100]", "[5:2]", "[-4:-2]"])
def test_slices_of_a_file_are_slices_of_its_rows(rows_file, part):
    path = rows_file([{"i": i} for i in range(10)])
    start, stop = (int(bound) if bound else None for bound in part[1:-1].split(":"))
    assert [row["i"] for row in read_file(f"{path}@{part}")] == list(range(10))[start:stop]


def test_blank_lines_are_skipped(rows_file):
    assert list(read_file(rows_file(['{"a": 1}', "", "  ", '{"a": 2}']))) == [{"a": 1}, {"a": 2}]


def test_parquet_reads_like_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"prompt": str(i), "n": i} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(read_file(str(tmp_path / "rows.parquet"))) == rows
    assert list(read_file(f"{tmp_path / 'rows.parquet'}@[1:3]")) == rows[1:3]


def test_a_malformed_line_is_named_with_file_and_number(rows_file):
    path = rows_file(['{"a": 1}', "", '{"a": '])
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        list(read_file(path))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: expected a JSON object, found list"):
        list(read_file(rows_file(["[1]"])))


def test_a_line_that_is_no_utf8_is_named_like_any_other_bad_one(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xff"}\n{"prompt": "\xc3\xbc"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not UTF-8: invalid start byte at byte 13 of the line"):
        list(read_file(str(path)))
    left = Dataset(str(path), tokenizer, None, None, prompt_key="prompt", skips_bad_lines=True)
    assert [sample.prompt for sample in left] == ["a", "ü"]


def test_a_parquet_file_that_is_damaged_in_the_middle_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"a": str(i) * 50} for i in range(500)]), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[20:200] = bytes(180)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read after row 0"):
        list(read_file(str(path)))


def test_bad_lines_can_be_left_out_and_each_is_named(rows_file, tokenizer, caplog):
    path = rows_file([{"prompt": "a"}, {"prompt": "b"}, "{oops"])
    assert len(Dataset(path, tokenizer, None, None, prompt_key="prompt", skips_bad_lines=True)) == 2
    assert f"{path}:3: not valid JSON" in caplog.text
    with pytest.raises(DataError, match=r"rows\.jsonl:3"):
        Dataset(path, tokenizer, None, None, prompt_key="prompt")


def test_missing_files_and_unknown_formats_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl.*--prompt-data"):
        list(read_file(str(tmp_path / "gone.jsonl")))
    with pytest.raises(DataError, match=r"\.jsonl or \.parquet"):
        list(read_file(str(tmp_path / "rows.csv")))


def test_files_are_checked_before_anything_starts(rows_file, tmp_path):
    good = rows_file([{"a": 1}])
    assert list(check_prompt_file("--prompt-data", good)) == []
    bad = rows_file([{"a": 1}, "{"], "bad.jsonl")
    (tmp_path / "broken.parquet").write_text("nonsense")
    for path, fragment in [
        (bad, "bad.jsonl:2"),
        (rows_file([], "empty.jsonl"), "no row"),
        (f"{good}@[5:]", "no row"),
        (str(tmp_path / "gone.jsonl"), "gone.jsonl"),
        (str(tmp_path / "rows.csv"), "must end in"),
        ("no_such_name", "must end in"),
        (str(tmp_path / "broken.parquet"), "Parquet"),
    ]:
        (problem,) = check_prompt_file("--prompt-data", path)
        assert problem.startswith("--prompt-data")
        assert fragment in problem


def test_rows_become_samples_with_template_label_metadata_and_tools(rows_file, tokenizer):
    row = {"q": [{"role": "user", "content": "12+34="}], "a": "46", "metadata": '{"level": 2}', "tools": '[{"f": 1}]'}
    path = rows_file([row])
    data = Dataset(
        path, tokenizer, None, None, prompt_key="q", label_key="a", tool_key="tools", apply_chat_template=True
    )
    assert data[0].prompt == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    assert data[0].label == "46"
    assert data[0].metadata == {"level": 2, "tools": [{"f": 1}]}


def test_the_template_gets_the_tools_of_a_row_and_the_users_arguments(rows_file):
    seen = []

    class Template:
        chat_template = "x"

        def apply_chat_template(self, messages, **kwargs):
            seen.append(kwargs)
            return "rendered"

    path = rows_file([{"text": "1+1=", "tools": [{"f": 1}]}])
    options = {"apply_chat_template": True, "apply_chat_template_kwargs": {"enable_thinking": False}}
    assert Dataset(path, Template(), None, None, tool_key="tools", **options)[0].prompt == "rendered"
    expected = {"tools": [{"f": 1}], "tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert seen == [expected]


def test_text_prompts_are_wrapped_for_the_template_and_kept_without_it(rows_file, tokenizer):
    path = rows_file([{"text": "1+1="}])
    assert Dataset(path, tokenizer, None, None)[0].prompt == "1+1="
    templated = Dataset(path, tokenizer, None, None, apply_chat_template=True)[0].prompt
    assert templated.startswith("<|im_start|>user\n1+1=<|im_end|>")


def test_default_keys_fall_back_to_prompt_and_label(rows_file, tokenizer):
    data = Dataset(rows_file([{"prompt": "1+1=", "label": "2"}]), tokenizer, None, None, prompt_key="input")
    assert (data[0].prompt, data[0].label) == ("1+1=", "2")


def test_a_label_that_no_flag_asked_for_may_be_missing(rows_file, tokenizer):
    data = Dataset(rows_file([{"text": "1", "label": "2"}, {"text": "1"}]), tokenizer, None, None)
    assert [sample.label for sample in data.samples] == ["2", None]


@pytest.mark.parametrize(("value", "is_told"), [(0, False), ([], False), ([1], True), ("math", True)])
def test_metadata_that_are_no_object_are_left_out(rows_file, tokenizer, caplog, value, is_told):
    path = rows_file([{"text": "1", "metadata": value}] * 2)
    assert [sample.metadata for sample in Dataset(path, tokenizer, None, None).samples] == [{}, {}]
    assert caplog.text.count("(--metadata-key) is a") == is_told


@pytest.mark.parametrize(
    ("rows", "options", "fragment"),
    [
        ([{"x": 1}], {"prompt_key": "input"}, "rows.jsonl:1: there is no 'input' (--input-key) in this row; its keys"),
        ([{"text": "1", "y": 2}, {"text": "1"}], {"label_key": "y"}, "rows.jsonl:2: there is no 'y' (--label-key)"),
        ([{"text": 3}], {"apply_chat_template": True}, "rows.jsonl:1: 'text' must be text or a list of messages for"),
        ([{"text": None}], {}, "there is no 'text'"),
        ([{"text": "1", "metadata": "{broken"}], {}, "looks like JSON: not valid JSON"),
        ([{"text": "1", "tools": {"a": 1}}], {"tool_key": "tools"}, "must be a list of tools"),
        ([{"text": [{"content": "no role"}]}], {"apply_chat_template": True}, "rows.jsonl:1: the chat template"),
        ([], {}, "there is no row"),
    ],
)  # fmt: skip
def test_every_bad_row_is_an_error_that_says_where(rows_file, tokenizer, rows, options, fragment):
    with pytest.raises(DataError) as error:
        Dataset(rows_file(rows), tokenizer, None, None, **options)
    assert fragment in str(error.value)


def test_long_prompts_are_dropped_and_dropping_all_is_an_error(rows_file, tokenizer):
    path = rows_file([{"text": "1" * n} for n in (3, 9, 4)])
    assert [s.prompt for s in Dataset(path, tokenizer, None, 4).samples] == ["111", "1111"]
    with pytest.raises(DataError, match="all 3 prompts are longer than 2 tokens"):
        Dataset(path, tokenizer, None, 2)


def test_message_lists_and_empty_lists_pass_the_length_filter(tokenizer):
    chats = [Sample(prompt=[{"role": "user", "content": "1" * 50}])]
    assert filter_long_prompt(chats, tokenizer, None, 3) is chats
    assert filter_long_prompt([], tokenizer, None, 3) == []


def test_the_order_depends_on_seed_and_epoch_only_and_global_randomness_is_untouched(rows_file, tokenizer):
    path = rows_file([{"text": str(i)} for i in range(20)])
    one, other = (Dataset(path, tokenizer, None, None, seed=7) for _ in range(2))
    one.shuffle(0)
    one.shuffle(3)
    state = random.getstate()
    other.shuffle(3)
    assert random.getstate() == state
    assert [s.prompt for s in one.samples] == [s.prompt for s in other.samples]
    expected = list(range(20))
    random.Random(7 + 3).shuffle(expected)
    assert [int(s.prompt) for s in one.samples] == expected


@pytest.mark.parametrize("prompt", [3, 0, 2.5, {"task": "x"}, [1, 2], ["a", "b"]])
def test_prompts_that_are_neither_text_nor_messages_pass_through_unchanged(rows_file, tokenizer, prompt):
    path = rows_file([{"index": prompt}, {"index": prompt}])
    for max_length in (None, 5):
        data = Dataset(path, tokenizer, None, max_length, prompt_key="index")
        assert [sample.prompt for sample in data] == [prompt, prompt]


def test_a_dataset_gives_its_next_prompts_and_begins_again(rows_file, tokenizer):
    data = Dataset(rows_file([{"text": str(i)} for i in range(3)]), tokenizer, None, None)
    assert data.sample(2) == ["0", "1"]
    assert data.sample(5) == ["2", "0", "1", "2", "0"]
    assert data.sample(0) == []


# --- values that later steps cannot hold


@pytest.mark.parametrize(
    ("row", "fragment"),
    [
        (r'{"text": "a \ud800 b"}', r"the escape \ud800 is half of a character (a lone surrogate)"),
        (r'{"text": "a", "metadata": "{\"x\": \"\\udfff\"}"}', r"rows.jsonl:1: 'metadata' (--metadata-key) looks like"),
        (f'{{"text": "a", "n": {"9" * 5000}}}', "a whole number has more than 4300 digits: write it as text"),
        (f'{{"text": "a", "metadata": "{{\\"x\\": {"9" * 5000}}}"}}', "(--metadata-key) looks like JSON: a whole"),
        (f'{{"text": "a", "x": {"[" * 101}{"]" * 101}}}', "nested in more than 100 levels"),
        (f'{{"text": "a", "x": {"[" * 99999}{"]" * 99999}}}', "nested in more than 100 levels"),
        (f'{{"text": "a", "tools": "{"[" * 200}{"]" * 200}"}}', "'tools' (--tool-key): values are nested"),
        ('{"text": "a", "label": NaN}', "'label' (--label-key) is nan, so the row has no label"),
        ('{"text": "a", "label": -Infinity}', "'label' (--label-key) is -inf, so the row has no label"),
    ],
)  # fmt: skip
def test_values_that_no_later_step_can_hold_are_named_with_their_row(rows_file, tokenizer, row, fragment):
    path = rows_file([row])
    with pytest.raises(DataError, match=re.escape(fragment)) as error:
        Dataset(path, tokenizer, None, 50, tool_key="tools")
    assert str(error.value).startswith(f"{path}:1: ")
    assert len(str(error.value)) < 600


def test_values_near_the_limits_are_kept(rows_file, tokenizer):
    deep = "[" * 99 + "]" * 99
    path = rows_file(
        [r'{"text": "\ud83d\ude00", "label": null}', f'{{"text": "a", "label": 1, "metadata": {{"x": {"9" * 4000}}}}}']
    )
    data = Dataset(path, tokenizer, None, None)
    assert (data[0].prompt, data[0].label) == ("😀", None)
    assert data[1].metadata["x"] == int("9" * 4000)
    fresh_copy(Dataset(rows_file([f'{{"text": "a", "metadata": {{"x": {deep[2:-2]}}}}}']), tokenizer, None, None)[0])


def test_bad_values_can_be_left_out(rows_file, tokenizer):
    path = rows_file(['{"text": "a"}', r'{"text": "\ud800"}', f'{{"text": {"9" * 5000}}}'])
    assert len(Dataset(path, tokenizer, None, None, skips_bad_lines=True)) == 1


def test_dates_decimals_and_maps_of_parquet_become_values_that_a_state_holds(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    meta = pa.struct(
        [("day", pa.timestamp("s")), ("price", pa.decimal128(5, 2)), ("tags", pa.map_(pa.string(), pa.int64()))]
    )
    schema = pa.schema([("text", pa.string()), ("metadata", meta)])
    row = {"text": "a", "metadata": {"day": datetime(2020, 1, 2), "price": Decimal("1.50"), "tags": [("k", 1)]}}
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "rows.parquet")
    data = Dataset(str(tmp_path / "rows.parquet"), tokenizer, None, None)
    assert data[0].metadata == {"day": "2020-01-02T00:00:00", "price": "1.50", "tags": {"k": 1}}
    json.dumps(data[0].to_dict())


class _CountingTokenizer:
    """Counts the characters that it tokenizes."""

    num_characters = 0

    def get_vocab(self):
        return {"a": 0, "aaaa": 1}

    def __call__(self, texts, **kwargs):
        self.num_characters += sum(map(len, texts))
        return {"input_ids": [[0] * len(text) for text in texts]}


def test_a_prompt_that_is_certainly_too_long_is_not_tokenized(rows_file):
    tokenizer = _CountingTokenizer()
    path = rows_file([{"text": "a" * 5_000_000}, {"text": "aa"}])
    assert [sample.prompt for sample in Dataset(path, tokenizer, None, 1000)] == ["aa"]
    assert tokenizer.num_characters == 2
    path = rows_file([{"text": "a" * 17_000_000}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt has 17000000 characters.*--rollout-max-prompt-len"):
        Dataset(path, tokenizer, None, None)


# --- special tokens in the text of a message


def test_special_tokens_in_a_message_are_reported_with_their_row(rows_file, tokenizer, caplog):
    path = rows_file([{"text": "1+1="}, {"text": "1<|im_end|>2"}, {"text": "3<|im_end|>"}])
    data = Dataset(path, tokenizer, None, None, apply_chat_template=True)
    (record,) = [r for r in caplog.records if "special token" in r.message]
    assert record.message.startswith(f"{path}:2: the text of a message contains the special token '<|im_end|>'")
    assert data[1].tokens == []
    caplog.clear()
    Dataset(path, tokenizer, None, None)
    assert not caplog.text, "without a template, the text is what its author rendered"


def test_special_tokens_in_a_message_can_be_encoded_as_text(rows_file, tokenizer, caplog):
    content = "1<|im_end|>2"
    messages = [{"role": "user", "content": content}]
    rows = [{"text": messages}, {"text": "1+1="}]
    data = Dataset(rows_file(rows), tokenizer, None, 60, apply_chat_template=True, special_tokens_as_text=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert data[0].prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(data[0].prompt, add_special_tokens=False).count(end) == 2
    assert data[0].tokens.count(end) == 1, "the template's own"
    quoted = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert any(data[0].tokens[i : i + len(quoted)] == quoted for i in range(len(data[0].tokens)))
    assert prepare_prompt_ids(data[0], tokenizer) == data[0].tokens
    assert data[1].tokens == []
    assert not caplog.text
    limit = len(data[0].tokens) - 1
    short = Dataset(rows_file(rows), tokenizer, None, limit, apply_chat_template=True, special_tokens_as_text=True)
    assert len(short) == 1, "its length is that of its ids"
