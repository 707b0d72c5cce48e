"""JSON documents on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic_core import to_jsonable_python


def to_json(document: Any) -> str:
    """Return a document, dataclasses included, as one line of JSON; infinities and NaN are null."""
    plain = to_jsonable_python(document, inf_nan_mode="null")
    return json.dumps(plain, ensure_ascii=False, allow_nan=False)


def print_json(document: Any) -> None:
    sys.stdout.write(to_json(document) + "\n")
    sys.stdout.flush()
