"""What came of a test: a table (`terminal`), plots (`figures`), a page (`page`), of one document.

The document is what `--output` writes: plain data, from which the rest can be made again
(`python -m loadtest.report FILE.json --html FILE.html`).
"""
