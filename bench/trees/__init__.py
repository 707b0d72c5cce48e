"""What trees of drafts would win over chains: `python -m bench.trees`."""
