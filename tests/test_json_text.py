"""JSON of clients is counted exactly, and without building anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec import json_text
from flyspec.errors import InvalidArgumentError
from flyspec.json_text import read_json

texts = st.text('a",\\[]{}: é\n', max_size=6)
values = st.recursive(
    st.none() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def parts(value) -> int:
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(parts, value))
        case dict():
            return 1 + sum(1 + parts(each) for each in value.values())
    return 0


@given(values, st.booleans())
def test_as_many_parts_as_there_are(value, as_ascii):
    text, count = json.dumps(value, ensure_ascii=as_ascii).encode(), parts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MAX_PARTS", count)
        assert read_json(text, "x", 100) == value
        patch.setattr(json_text, "MAX_PARTS", count - 1)
        if count:
            with pytest.raises(InvalidArgumentError, match="x: at most"):
                read_json(text, "x", 100)


def test_what_is_not_utf_8_hides_nothing():
    text = ('["\\"", ' + "{}, " * json_text.MAX_PARTS + "{}]").encode("utf-16-le")
    with pytest.raises(json.JSONDecodeError):
        read_json(text, "x")
