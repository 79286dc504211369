"""Images and texts, through the processor of a small model that reads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibration.readers import TURNS, picture, processor, tokenizer, vision_model

import fp4pass
from fp4pass.calibration import batches
from fp4pass.errors import CalibrationError

pytest.importorskip("transformers")
pytest.importorskip("PIL")

# Four patches are an image.
IMAGE = "<image>" * 4


def written(batch: Any, reader: Any) -> str:
    return str(reader.tokenizer.decode(batch["input_ids"][0]))


def turns(*contents: Any) -> list[dict[str, Any]]:
    names = ("user", "assistant")
    return [{"role": names[i % 2], "content": each} for i, each in enumerate(contents)]


LLAVA = [{"from": "human", "value": "what?\n<image>"}, {"from": "gpt", "value": "a list"}]
PARTS = [
    [{"type": "image", "image": picture()}, {"type": "text", "text": "and"}],
    "a list",
    [{"type": "text", "text": "this"}, {"type": "image", "image": picture(1)}],
]
LOOK = f"user: {IMAGE}how do I sort a list?\nassistant: with sorted(list)\n"
BOTH = f"user: {IMAGE}and\nassistant: a list\nuser: this{IMAGE}\n"
PLACES = turns([{"type": "image"}, {"type": "image"}], "two lists")


@pytest.mark.core
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"image": picture(), "text": "a list"}, f"user: {IMAGE}a list\n"),
        ({"image": picture(), "text": "see <image> here"}, f"user: {IMAGE}see  here\n"),
        ({"images": [picture()], "messages": TURNS[1:]}, LOOK),
        ({"image": picture(), "conversations": LLAVA}, f"user: {IMAGE}what?\nassistant: a list\n"),
        (turns(*PARTS), BOTH),
        (
            {"images": [picture(), picture(1)], "messages": PLACES},
            f"user: {IMAGE}{IMAGE}\nassistant: two lists\n",
        ),
    ],
)
def test_rows_with_images_go_through_the_processor(row: Any, text: str) -> None:
    reader = processor()
    (batch,) = batches([row], reader)
    count = text.count(IMAGE)
    assert written(batch, reader) == text
    assert batch["pixel_values"].shape == (count, 3, 28, 28)
    wanted = [reader.image_processor(picture(i), return_tensors="pt") for i in range(count)]
    assert torch.equal(batch["pixel_values"], torch.cat([each["pixel_values"] for each in wanted]))


def test_images_are_read_from_files(tmp_path: Path) -> None:
    reader, path = processor(), str(tmp_path / "one.png")
    picture().save(path)
    (wanted,) = batches([{"image": picture(), "text": "a"}], reader)
    for data in (
        [{"image": path, "text": "a"}],
        [turns([{"type": "image", "path": path}, {"type": "text", "text": "a"}])],
    ):
        (batch,) = batches(data, reader)
        assert torch.equal(batch["pixel_values"], wanted["pixel_values"])


def test_images_may_be_tensors() -> None:
    image = torch.randint(0, 256, (3, 40, 30), dtype=torch.uint8)
    found = batches([{"image": image, "text": "a"}], processor())
    assert found[0]["pixel_values"].shape == (1, 3, 28, 28)


def test_rows_of_one_shape_are_a_batch() -> None:
    rows = [{"image": picture(i), "text": text} for i, text in enumerate(("a", "b", "a b c"))]
    found = batches(rows, processor(), batch_size=2)
    assert [len(batch["input_ids"]) for batch in found] == [2, 1]
    assert len(batches(rows, processor(), samples=2)) == 2
    model = fp4pass.prepare(vision_model(), sequential=True)
    alone = batches([rows[0]] * 3, processor(), model=model)
    assert [len(batch["input_ids"]) for batch in alone] == [1, 2]


def test_calibration_on_images_reaches_all_layers() -> None:
    rows = [{"image": picture(i), "text": "a list"} for i in range(3)]
    model = fp4pass.prepare(vision_model())
    fp4pass.calibrate(model, rows, tokenizer=processor(), progress=False)
    report = fp4pass.report(fp4pass.convert(model, "nvfp4"))
    assert {row.name for row in report.skipped} == {"lm_head"}
    assert any("vision_tower" in row.name for row in report.converted)


@pytest.mark.parametrize(
    ("row", "reader", "message"),
    [
        ({"image": picture(), "text": "a"}, tokenizer, "row 0: an image, but .* reads text alone"),
        ({"image": "no.png", "text": "a"}, processor, "row 0: .* refuses it"),
        (turns([{"type": "image"}]), processor, "row 0: a message with a place for an image"),
    ],
)
def test_what_cannot_be_read_is_said(row: Any, reader: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        batches([row], reader())
