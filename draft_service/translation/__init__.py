"""Translation between two tokenizers, through text: no model, no torch.

`vocabulary` is a tokenizer, or a pair of them, `alignment` a sequence in both.
"""

from draft_service.translation.alignment import Alignment
from draft_service.translation.vocabulary import Translator, Vocabulary

__all__ = ["Alignment", "Translator", "Vocabulary"]
