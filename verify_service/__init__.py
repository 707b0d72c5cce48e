"""The verify service: the target model, and the rules that decide which drafted tokens stand."""
