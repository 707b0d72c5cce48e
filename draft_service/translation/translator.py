"""A target's and a draft's vocabulary, and the mapping of control tokens between them."""

from __future__ import annotations

from draft_service.translation.vocabulary import Vocabulary


class Translator:
    """Two vocabularies. Control tokens are not text: they map by name, and EOS maps to EOS."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        in_draft = {name: i for i, name in draft.all_bytes.items() if name}
        in_target = {name: i for i, name in target.control.items() if name}
        self._to_draft = {i: in_draft[name] for name, i in in_target.items() if name in in_draft}
        if draft.eos:
            self._to_draft = dict.fromkeys(target.eos, draft.eos[0]) | self._to_draft
        self._to_target = {
            i: in_target[name] for i, name in draft.control.items() if name in in_target
        }
        self._separator = draft.id_of(b"\n")
        beginnings = (*draft.head, *draft.eos, self._separator)
        self.filler = next((i for i in beginnings if i is not None), 0)
        """The token in a draft's context that would otherwise be empty."""

    def control_in_draft(self, token: int, after_text: bool) -> int | None:
        """Return the draft's token for a target's control token, if any.

        That is the one of the same name, or else a newline where text would run together.
        """
        found = self._to_draft.get(token)
        return self._separator if found is None and after_text else found

    def control_in_target(self, token: int, eos: int | None) -> int | None:
        """Return the target's control token for a draft's, if any; `eos` is the target's EOS."""
        found = self._to_target.get(token)
        if token in self.draft.eos and found not in self.target.eos:
            return eos
        return found
