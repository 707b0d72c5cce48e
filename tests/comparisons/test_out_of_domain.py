"""`bench.out_of_domain`: what is kept out of domain, by hand; sets, methods and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.out_of_domain.__main__ import (
    RECYCLED_FLY,
    DomainOptions,
    check,
    methods_of,
    read_paths,
    read_temperatures,
    tables,
    tasks_of,
)
from bench.out_of_domain.figures import ComparedMethod, SetFigures, beyond_all, findings, keeping
from bench.prompt_sets import file_group, read_named
from flyspec.errors import ConfigError
from flyspec_lab.statistics import Interval

EXACT = ComparedMethod("exact", "exact", "model", 15, False, ("words", "code"))
FLY = ComparedMethod("fly", "fly", "model", 15, False, ("words", "code"))
HEAD = ComparedMethod("head", "exact", "head", 5, True, ("code",))


def figures(method: str, name: str, tau: float, nats: float = 0.0) -> SetFigures:
    speedup = Interval(tau / 2, tau / 3, tau, tau / 3)
    return SetFigures(method, name, 0.0, 10, tau, None, speedup, None, -1.0, nats)


FOUND = [
    figures("exact", "words", 6.0), figures("exact", "code", 2.0), figures("exact", "far", 2.0),
    figures("fly", "words", 8.0, 0.1), figures("fly", "code", 4.0, 0.3),
    figures("fly", "far", 3.0, 0.4),
    figures("head", "words", 1.2), figures("head", "code", 3.0), figures("head", "far", 1.5),
]  # fmt: skip


def test_what_is_kept_is_relative_to_a_methods_own_domain() -> None:
    exact, fly, head = keeping([EXACT, FLY, HEAD], FOUND)
    assert (exact.within, exact.beyond, exact.kept) == (4.0, 2.0, 0.5)
    assert exact.drafts_kept == pytest.approx(1.0 / 3.0)
    assert (exact.gain_within, exact.gain_beyond) == (None, None)
    assert (fly.within, fly.beyond, fly.kept) == (6.0, 3.0, 0.5)
    assert (fly.gain_within, fly.gain_beyond) == (1.5, 1.5)
    assert (fly.nats_within, fly.nats_beyond) == pytest.approx((0.2, 0.4))
    assert (head.within, head.beyond, head.trained) == (3.0, 1.5, True)
    assert head.drafts_kept == pytest.approx(0.25)


def test_sets_of_any_domain_are_not_beyond_it() -> None:
    assert beyond_all([HEAD], ["words", "code", "far"]) == ["words", "far"]
    assert beyond_all([HEAD, FLY], ["words", "code", "far"]) == ["far"]


def test_only_trained_methods_are_judged_by_the_claim() -> None:
    (line,) = findings(keeping([EXACT, FLY, HEAD], FOUND), "fly")
    assert line == (
        "temperature 0: head keeps 50% of its tokens per round, fly 50%: that the trained part "
        "degrades more is refuted"
    )
    worse = [f if (f.method, f.set) != ("head", "far") else figures("head", "far", 1.1)
             for f in FOUND]  # fmt: skip
    assert findings(keeping([FLY, HEAD], worse), "fly")[0].endswith("is shown")
    assert not findings(keeping([HEAD], FOUND), "fly")


def test_tables_are_laid_out_like_the_papers() -> None:
    methods = [EXACT, FLY, HEAD]
    trained, beyond, kept = tables(methods, FOUND, keeping(methods, FOUND))
    assert trained.title == "Trained on, temperature 0"
    assert trained.columns == ["speed / τ", "words", "code", "mean"]
    assert trained.rows[1] == ["fly", "4.00 / 8.00", "2.00 / 4.00", "3.00 / 6.00"]
    assert beyond.columns == ["speed / τ", "far", "mean"]
    assert [row[0] for row in kept.rows] == ["exact", "fly", "head"]


def options(tmp_path: Path, **more: Any) -> DomainOptions:
    for name in ("de", "fr"):
        lines = "".join(f"Wie viele {i}?\t{i}\n" for i in range(1, 9))
        (tmp_path / f"mgsm_{name}.tsv").write_text(lines)
    files = [f"mgsm={tmp_path}/mgsm_{name}.tsv" for name in ("de", "fr")]
    given: dict[str, Any] = {"head": (("both", "x"), ("code", "y")), "limit": 4, **more}
    return DomainOptions(prompt_file=read_named(files), **given)


def test_sets_are_generated_or_from_one_or_several_files(tmp_path: Path) -> None:
    words, python, mgsm = tasks_of(options(tmp_path))
    assert [t.name for t in (words, python, mgsm)] == ["word_problems", "python", "mgsm"]
    assert [len(t.problems) for t in (words, python, mgsm)] == [4, 4, 4]
    assert [p.prompt_id for p in mgsm.problems][::2] == ["mgsm_de.tsv line 1", "mgsm_fr.tsv line 1"]
    assert [p.reference for p in mgsm.problems] == ["1", "2", "1", "2"]
    group = file_group("mgsm", [str(tmp_path / "mgsm_de.tsv"), str(tmp_path / "mgsm_fr.tsv")], 4)
    assert [p.where.rpartition(" ")[2] for p in group.prompts] == ["1", "5", "1", "5"]


def test_methods_have_the_domains_that_were_given(tmp_path: Path) -> None:
    o = options(tmp_path, trained_on=(("code", "python"),), autojudge=(("j", "file"),))
    found = {method.name: method for method in methods_of(o)}
    assert found["eagle3 both"].domain == ("word_problems", "python")
    assert found["eagle3 code"].domain == ("python",)
    assert found["eagle3 code"].num_speculative_tokens == 5
    assert (found["autojudge j"].rule, found["autojudge j"].drafter) == ("autojudge", "model")
    assert not found[RECYCLED_FLY].trained
    assert [method.name for method in methods_of(o, [("k", "file")])] == ["autojudge k"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trained_on": (("other", "python"),)}, "no --head or --autojudge has this name"),
        ({"trained_on": (("code", "pythn"),)}, "there is no set 'pythn'"),
        ({"trained_on": (("code", "mgsm"),)}, "give a set that is in nobody's domain"),
    ],
)
def test_names_that_nothing_has_are_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(options(tmp_path, **more), ["word_problems", "python", "mgsm"])


def test_arguments_are_read() -> None:
    assert read_temperatures("0,1,1") == (0.0, 1.0)
    for text in ("", "a", "-1"):
        with pytest.raises(ValueError, match="must be numbers"):
            read_temperatures(text)
    assert read_paths(["a=b=c"]) == (("a", "b=c"),)
    for texts in (["a"], ["a=x", "a=y"]):
        with pytest.raises(ValueError, match="must be NAME=PATH"):
            read_paths(texts)
    with pytest.raises(ValueError, match="is a set that needs no file"):
        read_named(["python=file"])
