"""The engine by itself and under load: a step's time, many requests at once, a long prompt."""
