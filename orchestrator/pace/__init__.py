"""The number of drafts of each round (K), fixed or adaptive. Pure: no I/O, no clocks."""
