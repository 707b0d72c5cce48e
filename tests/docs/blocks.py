"""The code blocks of the documents, with what is said about running them.

A comment before a block, `<!-- KIND: REASON -->`, says what a test does with it; without one it is
run, if its language can be, in the order of the document. Kinds:

- `gpu`, `cluster`, `hosts`, `long`, `network`, `sample`: not run, for want of a GPU, a cluster,
  other machines, time, a network, or because the reader has to fill something in. Still parsed.
- `file`: the block is written to the file that REASON names, for the blocks after it.
- `answer`: the last line of this text is the last line that the block before it printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
UNRUN = ("gpu", "cluster", "hosts", "long", "network", "sample")
_MARK = re.compile(rf"<!-- ({'|'.join(UNRUN)}|file|answer)(?:: ([^\n]*?))? -->\s*")


@dataclass(frozen=True)
class Block:
    """A block: where it is, its language, and its mark."""

    document: str
    line: int
    language: str
    text: str
    mark: str
    reason: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[str]:
    """Return every document that users read, README and tutorial first."""
    first = ["README.md", "docs/tutorial.md"]
    others = ["examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    found = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))]
    names = [*first, *(name for name in found if "/site/" not in name), *others]
    return [name for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def blocks(document: str) -> list[Block]:
    """Return the blocks of a document in order, those in lists and quotes too."""
    found, mark = [], ("", "")
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / document).read_text()):
        if token.type in ("fence", "code_block"):
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(document, line, _language(token), token.content, *mark))
            mark = ("", "")
        elif token.type == "html_block" and (said := _MARK.fullmatch(token.content)):
            mark = (said[1], said[2] or "")
        else:
            mark = ("", "")
    return found


def _language(token: Token) -> str:
    return token.info.strip() if token.type == "fence" else ""
