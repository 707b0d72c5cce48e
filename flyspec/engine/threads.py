"""CPU threads of torch: as requested, or by default as many as a container's limit allows."""

from __future__ import annotations

import torch

from flyspec.process import available_cores

_DEFAULT = torch.get_num_threads()


def set_threads(threads: int, ranks: int = 1) -> None:
    """Give this thread, and those it starts, its share of `threads` among the `ranks` of a host.

    With 0, the ranks share torch's default (the host's cores, or OMP_NUM_THREADS), capped at
    `available_cores`: torch does not see a container's limit, and threads beyond it are stopped in
    the middle of a step until the limit's period is over.
    """
    if threads or ranks > 1:
        shared = threads or min(_DEFAULT, available_cores())
        torch.set_num_threads(max(1, shared // ranks))
    elif torch.get_num_threads() > (cores := available_cores()):
        torch.set_num_threads(cores)
