"""The bundled model pair: its corpus and its training."""
