"""Attention over the slots: interface (`base`), implementation (`slot`), integration (`hook`)."""
