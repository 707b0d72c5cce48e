"""Finds a rule's thresholds for a user's own prompts.

`record` runs both models once and keeps what judging needs (`recording`); `replay` judges the
record by any rule; `search` chooses among rules and thresholds; `preset` writes the choice.
"""
