"""The orchestrator: owns the state of every generation and runs its rounds. Needs no torch."""
