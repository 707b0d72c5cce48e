"""torch uses as many threads as its container has cores, whatever the host has."""

import pytest
import torch

from flyspec.engine import threads


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "ranks", "host", "limit", "expected"),
    [
        (0, 1, 8, 2, 2),  # the host's cores are not the container's
        (0, 1, 2, 64, 2),  # OMP_NUM_THREADS, or a small host
        (6, 1, 8, 2, 6),  # what was asked for is given
        (0, 2, 8, 4, 2),
        (6, 2, 8, 4, 3),
        (0, 4, 8, 2, 1),
    ],
)
def test_threads_of_a_container(monkeypatch, asked, ranks, host, limit, expected):
    torch.set_num_threads(host)
    monkeypatch.setattr(threads, "_DEFAULT", host)
    monkeypatch.setattr(threads, "available_cores", lambda: limit)
    for _ in range(2):  # a service sets them for more than one thread
        threads.set_threads(asked, ranks)
        assert torch.get_num_threads() == expected
