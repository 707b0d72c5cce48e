"""What `flyspec bench` measures, and how it shows it.

Modules here may import services and torch: commands import them once they run, never before.
"""
