"""The orchestrator: owns the truth of every generation and sequences its rounds. No torch."""
