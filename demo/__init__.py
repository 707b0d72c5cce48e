"""The bundled model pair: its corpus, its training and its evaluation."""
