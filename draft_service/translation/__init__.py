"""Translation between two tokenizers, through text: no model, no torch.

`vocabulary` is a tokenizer, or a pair of them, `stream` a sequence of the target's tokens,
`alignment` the draft's tokens for it, `rendering` the draft's output as target tokens.
"""

from draft_service.translation.alignment import Alignment
from draft_service.translation.vocabulary import Translator, Vocabulary

__all__ = ["Alignment", "Translator", "Vocabulary"]
