"""Attention over the slots: its interface (`base`), its ways (`slot`), its place (`hook`)."""
