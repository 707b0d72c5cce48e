"""The verify service: the target model, and the rules that accept or reject drafted tokens."""
