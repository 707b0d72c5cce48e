"""The command line `flyspec`. Commands import what is heavy when they run: help is quick."""
