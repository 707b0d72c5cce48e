"""Retracting text on a terminal, tested with a minimal terminal emulator."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style

from flyspec.cli import render
from flyspec.cli.screen import Piece, Screen, rows
from flyspec.values.tokens import Origin
from tests.cli.terminal import Terminal
from tests.examples import examples

RED, BLUE = Style(color="red"), Style(color="blue")


def screen_of(terminal: Terminal, color: bool = True, lines: int = 1000) -> Screen:
    paint = render.paint if color else lambda text, style: text
    return Screen(terminal.write, paint, lambda: (terminal.columns, lines))


TEXT = st.text(st.sampled_from("abc \n\t数"), max_size=12)
PIECES = st.lists(st.tuples(TEXT, st.sampled_from([RED, BLUE])), max_size=6)


@settings(max_examples=examples(100))
@given(
    columns=st.integers(8, 20),
    steps=st.lists(st.tuples(PIECES, st.integers(0, 30)), max_size=6),
    color=st.booleans(),
)
def test_after_any_retracts_the_screen_is_as_if_nothing_else_had_been_written(
    columns: int, steps: list[tuple[list[Piece], int]], color: bool
) -> None:
    terminal = Terminal(columns)
    screen = screen_of(terminal, color)
    stands: list[Piece] = []
    for pieces, dropped in steps:
        screen.show(pieces)
        stands += pieces
        if dropped:
            keep = max(0, sum(len(t) for t, _ in stands) - dropped)
            cut: list[Piece] = []
            for text, style in stands:
                cut.append((text[:keep], style))
                keep -= min(keep, len(text))
            stands = [piece for piece in cut if piece[0]]
            screen.replace(stands)
    plain = Terminal(columns)
    screen_of(plain, color).show(stands)
    assert terminal.state == plain.state


def test_only_the_last_line_is_written_again() -> None:
    written: list[str] = []
    screen = Screen(written.append, lambda text, style: text, lambda: (80, 24))
    screen.show([("one\ntwo\n", RED), ("three", RED), (" four", RED)])
    screen.replace([("one\ntwo\n", RED), ("three", RED)])
    assert written[-2:] == ["\r\x1b[J", "three"]


def test_a_line_that_has_left_the_screen_is_written_once_more() -> None:
    terminal = Terminal(10)
    screen = screen_of(terminal, lines=3)
    screen.show([("x" * 45, RED)])
    screen.replace([("y", RED)])
    assert terminal.cells[5, 0] == "y"
    assert terminal.row == 5


def test_rows() -> None:
    assert [rows("x" * n, 10) for n in (0, 1, 10, 11, 20, 21)] == [1, 1, 1, 2, 2, 3]
    assert rows("a\n\nb", 10) == 3
    assert rows("数" * 6, 11) == 2
    assert rows("\t\t\t", 10) == 1


def test_pieces_of_a_chunk_are_as_wide_as_what_is_written() -> None:
    from flyspec.client import Chunk

    chunk = Chunk("a\x1b\x07", [1, 2], [Origin.PLAIN] * 2, ["a", "\x1b\x07"])
    texts = [text for text, _ in render.pieces(chunk)]
    assert all(render.visible(t) == t for t in texts)
