"""The site of the documentation: `make docs`. Reference pages are made from the code itself."""
