"""Studies: questions about rules, each answered by runs, with what papers claim beside it.

`study` has what a study is and makes its report, `catalogue` lists all of them; `fuzzy` and `batch`
have those that need more than a run of `flyspec eval`.
"""
