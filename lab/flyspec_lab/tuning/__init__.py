"""Finds a rule's thresholds for a user's own prompts.

`recording` runs both models once and keeps what judging needs; `replay` judges the record by any
rule; `search` chooses among rules and thresholds, with `certificates`; `tune` is the command.
"""
