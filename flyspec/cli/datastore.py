"""`flyspec datastore`: builds the datastores for the rest drafter."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator, Sequence
from json import loads
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec import bundled
from flyspec.cli.json_output import print_json
from flyspec.cli.options import with_flags
from flyspec.cli.program import needing
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.progress import error_console

if TYPE_CHECKING:
    from tokenizers import Tokenizer

app = typer.Typer(no_args_is_help=True)

TEXTS_AT_ONCE = 256
"""Tokenized together, in parallel."""
TEXT_FIELDS = ("text", "content")
"""Fields of a JSON line that may have its text."""


@app.callback()
def _group() -> None:
    """Datastores for the rest drafter."""


# fmt: off
@app.command("build")
@with_flags
def build(
    paths: Annotated[list[Path], typer.Argument(
        metavar="PATH", help="Files and directories of texts: text files, or JSON lines with "
        "`text`, also compressed with gzip.",
    )],
    output: Annotated[Path, Flag("Directory to write, for --datastore.")] = Path("datastore"),
    model: Annotated[str, Flag(
        "Target whose tokenizer is used: a directory or hub id.", default="the bundled target",
    )] = str(bundled.TARGET),
    pattern: Annotated[str, Flag("Which files of directories to read, such as *.py.")] = "*",
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
) -> None:
    # fmt: on
    """Build a datastore: retrieval drafts what followed the last tokens in it.

    Takes about a second per million tokens, and 12 bytes of memory per token of a shard.
    """
    began, console = perf_counter(), error_console()
    with needing("building", "datastore"):
        from tokenizers import Tokenizer

        from flyspec.datastore import build as building
        from flyspec.engine.bundle import load_bundle
        from flyspec.engine.configuration import read_config
    config = read_config(model)[1]
    bundle = load_bundle(model, config)
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    facts = building.build(
        output,
        _tokenized(tokenizer, read_texts(paths, pattern)),
        bundle.fingerprint,
        config.get_text_config().vocab_size,
        on_shard=lambda tokens: console.print(f"wrote a shard of {tokens:,} tokens"),
    )
    tokens, seconds = sum(facts.shards), perf_counter() - began
    if json:
        print_json({"datastore": str(output), "num_tokens": tokens,
                    "num_texts": facts.num_texts, "num_shards": len(facts.shards),
                    "tokenizer_fingerprint": facts.tokenizer_fingerprint,
                    "seconds": seconds})  # fmt: skip
        return
    print(
        f"{facts.num_texts:,} texts, {tokens:,} tokens in {seconds:.1f} s.\n"
        f"Draft from them with: flyspec serve --datastore {output} --drafter rest"
    )


def _tokenized(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[list[int]]:
    while batch := list(itertools.islice(texts, TEXTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield encoding.ids


def read_texts(paths: Sequence[Path], pattern: str = "*") -> Iterator[str]:
    """Yield the texts of files, and of all files below directories that match `pattern`.

    Each line of JSON lines (`.jsonl`, `.jsonl.gz`) has a text; any other file is one. Below
    directories, files that are not UTF-8 are skipped, as is what is hidden. Raises `ConfigError`.
    """
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob(pattern)):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    yield from _texts_of(file, or_skip=True)
        else:
            yield from _texts_of(path)


def _texts_of(path: Path, or_skip: bool = False) -> Iterator[str]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        if or_skip:
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: {reason}") from None
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        if text:
            yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_of(line, f"{path}:{number}")


def _text_of(line: str, where: str) -> str:
    try:
        fields = loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    for name in TEXT_FIELDS:
        if isinstance(fields, dict) and isinstance(fields.get(name), str):
            text: str = fields[name]
            return text
    raise ConfigError(f"{where}: needs a text in the field {' or '.join(TEXT_FIELDS)}")
