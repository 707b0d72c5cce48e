"""Ranks check that their hosts have the same weights, by one number from each host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flyspec.config import VerifySettings
from flyspec.engine.parallel import Place, RankGroup
from flyspec.errors import ConfigError
from verify_service import ranks

MOST = torch.iinfo(torch.int64).max


class Group(RankGroup):
    """A rank among others that call `all_equal` with these numbers at the same time."""

    def __init__(self, others: list[int | None]) -> None:
        self._others, self._calls = others, 0

    def least(self, number: int) -> int:
        self._calls += 1
        sign = 1 if self._calls == 1 else -1
        return min([number, *(MOST if other is None else sign * other for other in self._others)])


@pytest.mark.parametrize(
    ("own", "others", "equal"),
    [
        (5, [5, 5], True),
        (5, [None, 5, None], True),
        (None, [None, 5, 5], True),
        (None, [None], True),
        (5, [6], False),
        (None, [5, 6], False),
        (16**15 - 1, [16**15 - 2], False),
        (0, [0, None], True),
    ],
)
def test_all_ranks_see_the_same(own, others, equal):
    assert Group(others).all_equal(own) == equal
    for index, other in enumerate(others):
        rest = [own, *others[:index], *others[index + 1 :]]
        assert Group(rest).all_equal(other) == equal


def test_a_host_with_other_weights_does_not_start(monkeypatch):
    info = SimpleNamespace(weights_fingerprint=f"{5:032x}"[::-1])
    loaded = SimpleNamespace(info=info)
    monkeypatch.setattr(ranks, "load_model", lambda *_: loaded)
    group = Group([6])
    group.place, group.device = Place(0, 2, 0, 1, "elsewhere", 0), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--model here: the ranks' hosts have different weights"):
        ranks.load(VerifySettings(model="here"), group)
