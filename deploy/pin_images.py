"""Adds digests to the images of others in `.env`: `python deploy/pin_images.py [FILE]`.

Asks their registries, through docker, what the tags stand for now. What cannot be asked stays as it
is, is told, and makes the exit code 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = re.compile(r"^(?P<variable>\w+_IMAGE)=(?P<image>[^@\s]+)(@sha256:[0-9a-f]{64})?$", re.M)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TIMEOUT_S = 60.0


def digest_of(image: str) -> str:
    """What the tag stands for in its registry. Raises `OSError`, with the reason."""
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format",
               "{{.Manifest.Digest}}"]  # fmt: skip
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {TIMEOUT_S:g} s") from None
    if asked.returncode or not DIGEST.fullmatch(asked.stdout.strip()):
        raise OSError((asked.stderr or asked.stdout).strip() or "docker says nothing")
    return asked.stdout.strip()


def main() -> int:
    """Pin what can be pinned."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".env"
    text, code = path.read_text(), 0
    for found in list(IMAGE.finditer(text)):
        image = found["image"]
        try:
            digest = digest_of(image)
        except OSError as error:
            print(f"{image} is not pinned: {error}", file=sys.stderr)
            code = 1
            continue
        text = text.replace(found[0], f"{found['variable']}={image}@{digest}")
        print(f"{image}@{digest}")
    path.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
