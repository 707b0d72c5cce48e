"""Steps that ran before their rounds: of the proposals that a head sent with verdicts.

While the verdict travels to the orchestrator and the next round comes back, the target would wait.
Most often that round has the proposal that the verdict carried, or its beginning. So the step that
it would need runs at once, and its rows are kept for it. They are found by the step itself: a round
that continues otherwise has another step, and runs it.
"""

from __future__ import annotations

from flyspec.engine.model import Rows, Step


class EarlySteps:
    """Rows of the last early step of each slot. Everything runs in the engine's thread."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Step, Rows, int]] = {}
        self._times_ns: dict[int, int] = {}

    def keep(self, step: Step, rows: Rows, time_ns: int) -> None:
        """Keep a copy of a step's rows; it took `time_ns`."""
        copied = Rows(rows.logits.clone(), tuple(each.clone() for each in rows.hidden))
        self._kept[step.slot] = step, copied, time_ns

    def take(self, step: Step) -> Rows | None:
        """Return the rows of a step that ran early, perhaps with more drafts; else None."""
        ran, rows, time_ns = self._kept.pop(step.slot, (None, None, 0))
        if ran is None or rows is None:
            return None
        same = step._replace(
            token_ids=ran.token_ids, num_logits=ran.num_logits, num_hidden=ran.num_hidden
        )
        if same != ran or ran.token_ids[: len(step.token_ids)] != step.token_ids:
            return None
        cut = len(ran.token_ids) - len(step.token_ids)
        unread = ran.num_logits - step.num_logits, ran.hidden_count - step.hidden_count
        if unread != (cut, cut if step.hidden_layers else 0):
            return None
        self._times_ns[step.slot] = time_ns
        hidden = tuple(each[: step.hidden_count] for each in rows.hidden)
        return Rows(rows.logits[: step.num_logits], hidden)

    def time_ns(self, slot: int) -> int:
        """Return, once, how long the step took whose rows were taken; 0 if none were."""
        return self._times_ns.pop(slot, 0)

    def forget(self, slot: int) -> None:
        """Drop what is kept of a slot."""
        self._kept.pop(slot, None)
        self._times_ns.pop(slot, None)
