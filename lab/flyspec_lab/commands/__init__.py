"""Commands of the laboratory; each is an entry point of the group `flyspec.commands`."""
