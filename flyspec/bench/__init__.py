"""What `flyspec bench` and `flyspec eval` measure, and how they show it.

Modules here may import services and torch: commands import them once they run, never before.
"""
