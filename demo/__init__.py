"""The bundled models: a demonstration of the services on them, and their GGUF files."""
