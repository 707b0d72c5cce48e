"""Ways of drafting, one a file; `base` has the protocol that they share."""
