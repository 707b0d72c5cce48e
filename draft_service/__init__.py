"""The draft service: guesses the next tokens of a sequence with a small model or by lookup."""
