"""The figures of docs/how-it-works.md, of a real run of the bundled pair.

`python -m docs.figures` generates anew, writes docs/images/rounds.json and draws from it;
`python -m docs.figures --draw` only draws. Colours follow the reader's preference for light or
dark, and every kind of token has a mark besides its colour.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DATA = IMAGES / "rounds.json"
PROMPT = (
    "A bus sets out with 49 people. At the first stop 16 get on and 5 get off. At the second stop "
    "10 get on and 8 get off. How many people are on the bus then?"
)
THRESHOLD = 0.3
END = 5
"""The token that ends an answer; nothing after it is emitted."""
STYLE = """
  :root { color-scheme: light dark }
  .page { fill: #ffffff } .text { fill: #1f2328 } .faint { fill: #59636e } .axis { stroke: #59636e }
  .exact { fill: #d3efd9 } .loose { fill: #f3d4f0 } .rejected { fill: #ffd8d3 }
  .own { fill: #d5e4fb } .skipped { fill: #eceef0 } .bar { fill: #8fb4e8 }
  .barloose { fill: #a626a4 } .barown { fill: #cf222e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #151b23 } .text { fill: #e6edf3 } .faint { fill: #9198a1 }
    .axis { stroke: #9198a1 }
    .exact { fill: #1d4428 } .loose { fill: #5c2a5a } .rejected { fill: #67211c }
    .own { fill: #1e3a66 } .skipped { fill: #2a313c } .bar { fill: #3f6cab }
    .barloose { fill: #e48be0 } .barown { fill: #ff7b72 }
  }
  text { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace }
  .label { font-family: system-ui, 'DejaVu Sans', sans-serif }
"""
CELL, GAP, LEFT = 7.3, 4, 62
OUTCOMES = {
    "EXACT": ("exact", "=", "drafted, the target's own"),
    "LOOSE": ("loose", "~", "loosely accepted"),
    "REJECTED": ("rejected", "×", "rejected"),
    "NOT_REACHED": ("skipped", " ", "not reached"),
    "OWN": ("own", "+", "the target's token: correction or bonus"),
}
"""Class, mark and meaning of each kind of token."""


def main() -> None:
    """Run the pair unless told only to draw; draw."""
    if "--draw" not in sys.argv:
        DATA.write_text(json.dumps(run(), ensure_ascii=False, indent=1) + "\n")
    for name, svg in figures(json.loads(DATA.read_text())).items():
        (IMAGES / name).write_text(svg)


def run() -> dict[str, Any]:
    """Generate with the bundled pair, and keep what the figures show."""
    command = [sys.executable, "-m", "flyspec.cli", "generate", "--local", "--json", "--chat",
               "--rule", "fly", "--num-speculative-tokens", "15", "--return-rounds",
               "--logprobs", "3", PROMPT]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    tokenizer = Tokenizer.from_file(str(ROOT / "demo/models/target/tokenizer.json"))

    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False))

    rounds = [
        {
            "drafts": [
                {"text": text(token_id), "outcome": decision["outcome"],
                 "entropy": decision["entropy"], "gap_nats": decision["gap_nats"]}
                for token_id, decision in zip(r["draft_token_ids"], r["decisions"], strict=True)
            ],
            "next": "" if END in r["draft_token_ids"] else text(r["next_token_id"]),
        }
        for r in told["rounds"]
    ]  # fmt: skip
    tokens = [
        {"text": entry["token"], "origin": origin, "top_3_entropy": _entropy(entry)}
        for entry, origin in zip(told["logprobs"], told["origins"], strict=True)
    ]
    return {"prompt": PROMPT, "text": told["text"], "rounds": rounds, "tokens": tokens}


def _entropy(entry: dict[str, Any]) -> float:
    """Return −Σ p log p over the three most likely tokens, as the rule fly computes it."""
    logs = [top["logprob"] for top in entry["top_logprobs"][:3]]
    return float(round(-sum(math.exp(log) * log for log in logs), 4))


def figures(data: dict[str, Any]) -> dict[str, str]:
    """Return each figure's SVG by its file name."""
    return {"rounds.svg": _rounds(data["rounds"]), "entropy.svg": _entropies(data["tokens"])}


def _svg(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="6"/>\n{body}\n</svg>\n'
    )


def _rounds(rounds: Sequence[dict[str, Any]]) -> str:
    rows, widest = [], 0.0
    for number, one in enumerate(rounds):
        tokens = [(draft["text"], draft["outcome"]) for draft in one["drafts"]]
        tokens += [(one["next"], "OWN")] if one["next"] else []
        x, y = float(LEFT), 20 + number * 40
        rows.append(f'<text class="faint label" x="12" y="{y + 14}">{f"round {number}"}</text>')
        for text, outcome in tokens:
            kind, mark, _ = OUTCOMES[outcome]
            shown = text.replace("\n", "⏎").replace(" ", "·")
            width = CELL * max(len(shown), 1) + 6
            rows.append(
                f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="20" rx="3"/>'
                f'<text class="text" x="{x + 3:g}" y="{y + 14}">{escape(shown)}</text>'
                f'<text class="faint" x="{x + width / 2 - 3:g}" y="{y + 32}">{mark}</text>'
            )
            x += width + GAP
        widest = max(widest, x)
    y, x = 20 + len(rounds) * 40 + 8, 12.0
    for kind, mark, meaning in OUTCOMES.values():
        rows.append(
            f'<rect class="{kind}" x="{x:g}" y="{y}" width="18" height="18" rx="3"/>'
            f'<text class="text" x="{x + 5.5:g}" y="{y + 13}">{mark}</text>'
            f'<text class="text label" x="{x + 24:g}" y="{y + 13}">{escape(meaning)}</text>'
        )
        x += 40 + 6.6 * len(meaning)
    return _svg(max(widest, x) + 8, y + 30, "Rounds of a generation, token by token", iter(rows))


def _entropies(tokens: Sequence[dict[str, Any]]) -> str:
    step, height, left, top = 9, 160, 62, 20
    most = math.log(3)

    def at(entropy: float) -> float:
        return top + height * (1 - entropy / most)

    parts = []
    for tick in (0, THRESHOLD, 0.6, 0.9):
        dash = "" if tick in (0,) else ' stroke-dasharray="3 4"'
        end = left + step * len(tokens)
        parts.append(
            f'<line class="axis" x1="{left}" x2="{end}" y1="{at(tick):.1f}" y2="{at(tick):.1f}" '
            f'stroke-width="{2 if tick == THRESHOLD else 0.6}"{dash}/>'
            f'<text class="faint label" x="12" y="{at(tick) + 4:.1f}">'
            f"{'θ = ' if tick == THRESHOLD else ''}{tick:g}</text>"
        )
    for number, token in enumerate(tokens):
        kind, mark = {"LOOSE": ("barloose", "~"), "CORRECTION": ("barown", "×")}.get(
            token["origin"], ("bar", "")
        )
        x, y = left + number * step + 1, at(token["top_3_entropy"])
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{step - 2}" '
            f'height="{top + height - y:.1f}"/>'
            f'<text class="text" x="{x}" y="{y - 4:.1f}">{mark}</text>'
        )
    y = top + height + 24
    legend = (("bar", "the target's own token"), ("barloose", "~ loosely accepted"),
              ("barown", "× rejected draft, corrected"))  # fmt: skip
    along = float(left)
    for kind, meaning in legend:
        parts.append(
            f'<rect class="{kind}" x="{along:g}" y="{y - 11}" width="12" height="12"/>'
            f'<text class="text label" x="{along + 18:g}" y="{y}">{meaning}</text>'
        )
        along += 44 + 6.6 * len(meaning)
    width = left + step * len(tokens) + 16
    return _svg(width, y + 16, "The target's entropy along a text", iter(parts))


if __name__ == "__main__":
    main()
