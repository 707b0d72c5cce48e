"""Files that come with flyspec: the bundled models, and the protos.

In a checkout both are links, to demo/models and protos; the wheel contains the files themselves.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
MODELS = (_HERE / "models").resolve()
"""The bundled models, in Hugging Face format. Images have none."""
TARGET, DRAFT, DRAFT_BYTES = (MODELS / name for name in ("target", "draft", "draft-bytes"))
AUTOJUDGE = MODELS / "autojudge.safetensors"
"""A judge of the bundled pair, made by `flyspec autojudge train`; it fits no other target."""
EAGLE3 = MODELS / "eagle3"
"""An EAGLE-3 head of the bundled target, made by `flyspec heads train`; it fits no other."""
PROTOS = (_HERE / "protos").resolve()
"""Include path of the protocol, for stubs in other languages: `protoc -I PROTOS ...`."""
