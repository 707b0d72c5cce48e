"""The speed of a pair of models by calculation, from shapes and devices; nothing is loaded."""
