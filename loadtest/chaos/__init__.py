"""Fault injection: `python -m loadtest.chaos` kills, stops and cuts off services under load."""
