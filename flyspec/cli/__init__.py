"""The `flyspec` command line. Commands import heavy modules only when they run; help is fast."""
