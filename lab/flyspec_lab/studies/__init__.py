"""Studies: questions about rules, each answered by runs, with what papers claim beside it.

`study` has what a study is and makes its report, `catalogue` lists all of them, those of `fuzzy`
among them.
"""
