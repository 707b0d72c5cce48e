"""Evidence for rules, and measurements of speed: the distribution flyspec-lab, beside flyspec."""
