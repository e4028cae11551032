"""A line of pictures.jsonl as a typed model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from hookrun.store.records import Count, Name, Record


class PictureLine(Record):
    """A line of pictures.jsonl: a small picture of a sample, a PNG in base64."""

    split: Name
    sample: Count
    png: Annotated[str, StringConstraints(max_length=2**17, pattern=r"^iVBORw0KGgo[A-Za-z0-9+/]*={0,2}$")]


PICTURES_LINE: TypeAdapter[Any] = TypeAdapter(PictureLine)
