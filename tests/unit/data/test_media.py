"""Images of prompts: out of rows, through the processor, into the engine's request and back out of a checkpoint."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from slime.data.processing import (
    expand_media,
    load_processor,
    load_tokenizer,
    media_from_state,
    media_to_state,
    process_vision_info,
)
from slime.data.prompts import Dataset, filter_long_prompt
from slime.data.sample import Sample
from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.async_utils import run
from slime.utils.errors import DataError
from tests.unit.config.tiny_command import make_command
from tests.unit.data.tiny_vision import make_vision_checkpoint
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args

KEYS = {"image": "images"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_vision_checkpoint(tmp_path_factory.mktemp("vision"))


def picture(color: tuple[int, int, int] = (255, 0, 0), size: int = 16) -> Image.Image:
    return Image.new("RGB", (size, size), color)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def as_text(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_media_take_the_places_of_their_placeholders_and_the_row_stays_as_it_was() -> None:
    row = {"images": ["a", {"type": "image", "image": "b", "max_pixels": 9}], "videos": None}
    messages = user("look <image> and <image>!")
    (message,) = expand_media("f:1", messages, row, {"image": "images", "video": "videos"})
    assert message["content"] == [
        {"type": "text", "text": "look "},
        {"type": "image", "image": "a"},
        {"type": "text", "text": " and "},
        {"type": "image", "image": "b", "max_pixels": 9},
        {"type": "text", "text": "!"},
    ]
    assert messages == user("look <image> and <image>!")
    assert len(row["images"]) == 2


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"image": "b", "max_pixels": 9}, {"type": "image", "image": "b", "max_pixels": 9}),
        ({"image_url": "u"}, {"type": "image", "image_url": "u"}),
        ({"bytes": b"", "path": None}, {"type": "image", "image": {"bytes": b"", "path": None}}),
    ],
)
def test_the_settings_of_an_image_are_its_item(item: dict[str, Any], expected: dict[str, Any]) -> None:
    (message,) = expand_media("f:1", user("<image>"), {"images": [item]}, KEYS)
    assert message["content"] == [expected]


def test_a_row_without_media_keeps_its_text_even_with_a_placeholder_in_it() -> None:
    assert expand_media("f:1", user("a <image> tag"), {}, KEYS) == user("a <image> tag")


@pytest.mark.parametrize(
    ("text", "images", "fragment"),
    [("<image><image>", ["a"], "more <image>"), ("none", ["a"], "1 <image> given, 0 in the prompt")],
)
def test_counts_that_differ_name_the_row(text: str, images: list[str], fragment: str) -> None:
    with pytest.raises(DataError, match=fragment) as caught:
        expand_media("f.jsonl:7", user(text), {"images": images}, KEYS)
    assert "f.jsonl:7" in str(caught.value)


def test_unknown_kinds_of_media_are_named() -> None:
    with pytest.raises(DataError, match=r"'smell'.*image, video, audio"):
        expand_media("f:1", user("x"), {}, {"smell": "s"})


def test_images_are_read_from_every_form_that_rows_have(tmp_path: Path) -> None:
    red = picture()
    file = tmp_path / "red.png"
    file.write_bytes(png(red))
    forms = [
        red,
        str(file),
        f"file://{file}",
        as_text(red),
        "data:image/png;base64," + as_text(red),
        png(red),
        {"bytes": png(red), "path": None},
        {"path": str(file)},
    ]
    items = [{"type": "image", "image": form} for form in forms]
    images = process_vision_info([{"role": "user", "content": items}], None)["images"]
    assert [(image.size, image.getpixel((3, 3))) for image in images] == [((16, 16), (255, 0, 0))] * len(forms)


def test_base64_that_is_longer_than_a_file_name_may_be_is_read() -> None:
    """The file system refuses to look up a name of more than 255 characters. A slash ends a name."""
    green = Image.new("RGB", (128, 128), "green")
    assert len(as_text(green).split("/")[0]) > 255
    items = [{"type": "image", "image": as_text(green)}]
    (image,) = process_vision_info([{"role": "user", "content": items}], None)["images"]
    assert image.size == (128, 128)


@pytest.mark.parametrize("source", ["no/such/file.png", "data:image/png;base64,AAAA", None, 5])
def test_what_is_no_image_is_an_error(source: Any) -> None:
    with pytest.raises(DataError, match="no image"):
        process_vision_info([{"role": "user", "content": [{"type": "image", "image": source}]}], None)


def test_a_checkpoint_without_processor_files_has_none_and_media_then_are_an_error(tiny_task: Any, tmp_path: Path):
    assert load_processor(tiny_task.model) is None
    path = write_rows(tmp_path, [{"prompt": "<image>", "images": [as_text(picture())]}])
    with pytest.raises(DataError, match="--multimodal-keys: the checkpoint has no processor"):
        Dataset(path, None, None, None, prompt_key="prompt", multimodal_keys=KEYS)


def load(checkpoint: str, path: str, max_length: int | None = None) -> Dataset:
    return Dataset(
        path,
        load_tokenizer(checkpoint, trust_remote_code=True),
        load_processor(checkpoint, trust_remote_code=True),
        max_length,
        prompt_key="prompt",
        multimodal_keys=KEYS,
        apply_chat_template=True,
    )


def test_the_length_of_a_prompt_counts_its_image(checkpoint: str, tmp_path: Path) -> None:
    small, large = picture(size=8), picture(size=32)
    rows = [{"prompt": "<image>?", "images": [as_text(small)]}, {"prompt": "<image>?", "images": [as_text(large)]}]
    path = write_rows(tmp_path, [*rows, {"prompt": "no picture"}])
    samples = load(checkpoint, path).origin_samples
    assert [sample.multimodal_inputs is None for sample in samples] == [False, False, True]
    kept = load(checkpoint, path, max_length=26).origin_samples  # <user>?<assistant> and 2 + 1 for an 8 x 8 image
    assert [sample.prompt for sample in kept] == [samples[0].prompt]
    again = filter_long_prompt(samples, load_tokenizer(checkpoint), load_processor(checkpoint), 26)
    assert again == [samples[0]]


@pytest.fixture
def engine() -> Any:
    sglang_rollout.GenerateState.clear_instances()
    engine = FakeEngine(lambda payload, number: (200, completion(payload, [5, 6], text="ab")))
    yield engine
    engine.close()
    sglang_rollout.GenerateState.clear_instances()


def one_prompt(args: Any) -> Sample:
    (group,) = RolloutDataSourceWithBuffer(args).get_samples(1)
    return group[0]


def test_the_engine_gets_text_and_image_and_the_sample_the_processors_outputs(
    checkpoint: str, engine: FakeEngine, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, [{"prompt": "<image>what?", "images": [as_text(picture())], "label": "red"}])
    args = make_args(
        *(checkpoint, engine.port),
        **{"prompt_data": path, "input_key": "prompt", "multimodal_keys": KEYS, "apply_chat_template": True},
        rollout_max_prompt_len=None,
    )
    sample = one_prompt(args)
    params = sglang_rollout.GenerateState(args).sampling_params
    run(sglang_rollout.generate(args, sample, params))
    (request,) = engine.requests
    assert request["text"] == sample.prompt == "<user><|vision_start|><|image_pad|><|vision_end|>what?<assistant>"
    assert "input_ids" not in request
    (sent,) = media_from_state({"images": request["image_data"]})["images"]
    assert sent.tobytes() == picture().tobytes()
    pad = load_tokenizer(checkpoint).convert_tokens_to_ids("<|image_pad|>")
    assert sample.tokens.count(pad) == 4
    assert sample.multimodal_train_inputs["pixel_values"].shape == (16, 96)
    assert sample.tokens[-2:] == [5, 6]

    sample.status = Sample.Status.ABORTED
    run(sglang_rollout.generate(args, sample, params))
    rest = engine.requests[1]
    places = [index for index, token in enumerate(sample.tokens[:-2]) if token == pad]
    assert rest["input_ids"] == [t for i, t in enumerate(sample.tokens[:-2]) if i not in places[1:]]
    assert len(rest["image_data"]) == 1
    assert "text" not in rest
    assert sample.response_length == 4


def test_prompts_with_images_survive_a_checkpoint_of_the_data_source(checkpoint: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "<image>what?", "images": [as_text(picture((1, 2, 3)))]}])
    args = make_args(checkpoint, 1, prompt_data=path, input_key="prompt", multimodal_keys=KEYS, n_samples_per_prompt=2)
    args.apply_chat_template, args.rollout_max_prompt_len, args.save = True, None, str(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(1))
    source.save(3)
    args.load = args.save
    again = RolloutDataSourceWithBuffer(args)
    again.load(3)
    (group,) = again.get_samples(1)
    assert [sample.multimodal_inputs["images"][0].getpixel((0, 0)) for sample in group] == [(1, 2, 3)] * 2
    assert group[0].multimodal_inputs["videos"] is None


def test_media_of_a_state_come_back_pixel_by_pixel() -> None:
    image = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    (again,) = media_from_state(json.loads(json.dumps(media_to_state({"images": [image]}))))["images"]
    assert again.tobytes() == image.tobytes()
    assert media_to_state(None) is media_from_state(None) is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "no vision tower that can be trained, which images need: drop --multimodal-keys"),
        (("--train-backend", "fsdp"), "--multimodal-keys is not supported yet with --train-backend fsdp"),
    ],
)
def test_training_on_images_needs_a_tower_and_generating_does_not(
    flags: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    command = make_command(tmp_path)
    keys = ("--multimodal-keys", json.dumps(KEYS), *flags)
    _, problems = command.run(*keys)
    assert problem in problems
    _, problems = command.run(*keys, "--debug-rollout-only")
    assert "--multimodal-keys" not in problems


def test_flags_of_evaluation_and_failures_that_cannot_work_are_refused(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    _, problems = command.run("--background-eval", "--colocate", "--max-failed-share", 2)
    assert "--background-eval needs engines of their own" in problems
    assert "--max-failed-share 2.0 must be between 0 and 1" in problems
