"""Studies: questions about rules, each answered by runs, tables and plots in one report.

`page` is the report; each other module has the studies of one kind, and `STUDIES` lists them.
"""
