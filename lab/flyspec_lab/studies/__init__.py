"""Studies: questions about rules, each answered by runs, tables and plots in one report.

`study` says what a study is, `catalogue` lists all of them; those of a kind are in `drafting`,
`open_ended`, `fuzzy` and `batch`. `report` turns what was found into a `page`, of which `axis`,
`thresholds` and `divergences` make parts.
"""
