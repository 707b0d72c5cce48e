"""Rounds whose drafts are a tree: which of its paths is judged.

The path follows the target's own tokens from the last token of the sequence on. Where no draft is
the target's own, it goes on with the first one, the drafter's main choice: the mismatch that the
rule judges. The path and its rows are then judged like any chain, so that a chain that is sent as a
tree has the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from flyspec.draft_trees import Parents, check_parents, children
from flyspec.engine.logits import process_logits
from flyspec.engine.model import History, Rows
from flyspec.engine.sampling import choose_processed
from flyspec.errors import InvalidArgumentError
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import VerifyRound
from verify_service.sessions import TargetSession

OwnToken = Callable[[int, Sequence[int]], int]
"""Returns the target's own token after a row, given the indices of the drafts that lead to it."""


def check_tree(session: TargetSession, round_: VerifyRound, refusal: str) -> None:
    """Raise `InvalidArgumentError` for drafts that cannot be judged as the tree that they are.

    `refusal` is the model's reason to take none.
    """
    if not round_.draft_parents:
        return
    name = "round.draft_parents"
    check_parents(name, round_.draft_parents, len(round_.draft_token_ids))
    for reason in (
        refusal,
        "the rule needs distributions of the drafts, which trees do not have"
        if session.distribution
        else "",
        "teacher_forced needs one text" if round_.teacher_forced else "",
        "heads read chains" if round_.head else "",
    ):
        if reason:
            raise InvalidArgumentError(f"{name}: {reason}; send a chain without them")


def judged_path(
    draft_token_ids: Sequence[int], parents: Parents, own: OwnToken, exact: bool
) -> list[int]:
    """Return the indices of the drafts to judge, from the root to a leaf.

    If the rules are `exact`, only what the target says up to the first mismatch matters.
    """
    following = children(parents)
    path: list[int] = []
    row, matches = 0, True
    while branches := following[row]:
        index = branches[0]
        if matches or not exact:
            token = own(row, path)
            same = (i for i in branches if draft_token_ids[i] == token)
            found = next(same, None)
            matches = found is not None
            index = index if found is None else found
        path.append(index)
        row = index + 1
    return path


def path_of(
    session: TargetSession, round_: VerifyRound, logits: Tensor, eos_token_ids: Collection[int]
) -> list[int]:
    """Return the path to judge of a round's tree, given the raw logits of its rows.

    There may be fewer rows than drafts and one more: then the last drafts are left out.
    """
    count = logits.shape[0] - 1
    drafts, parents = round_.draft_token_ids[:count], round_.draft_parents[:count]
    tokens, sampling = session.sequence.tokens, session.sampling

    def own(row: int, path: Sequence[int]) -> int:
        before, history = [drafts[i] for i in path], None
        if sampling.needs_history:
            history = History([*tokens, *before], session.prompt_length, eos_token_ids)
        processed = process_logits(logits[row : row + 1], sampling, history)
        position = len(tokens) + len(path)
        return int(choose_processed(processed, sampling, [position], session.seed))

    exact = all(RULE_PRESETS[rule.name].token_exact for rule in session.rules)
    return judged_path(drafts, parents, own, exact)


def rows_along(rows: Rows, path: Sequence[int]) -> Rows:
    """Return the rows before the tree's first draft and of the drafts at these indices."""
    wanted = [0, *(index + 1 for index in path)]
    return Rows(rows.logits[wanted], tuple(each[wanted] for each in rows.hidden))
