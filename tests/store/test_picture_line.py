"""Lines of pictures.jsonl: PNG only, because the page shows them."""

from __future__ import annotations

from base64 import b64encode

import pytest
from pydantic import ValidationError

from hookrun.store.picture_line import PICTURES_LINE

PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(12)).decode()


def test_a_png_in_base64_is_accepted() -> None:
    assert PICTURES_LINE.validate_python({"split": "val", "sample": 0, "png": PNG}).png == PNG


@pytest.mark.parametrize(
    "png", ["", b64encode(b"<svg onload=x>").decode(), PNG + '" onload="x', PNG + "\n<", PNG + "A" * 2**17]
)
def test_other_files_and_markup_are_refused(png: str) -> None:
    with pytest.raises(ValidationError):
        PICTURES_LINE.validate_python({"split": "val", "sample": 0, "png": png})
