"""Evidence for rules: tasks, recorded samples, statistics, studies and trained judges.

What measures speed is in `flyspec.bench`.
"""
