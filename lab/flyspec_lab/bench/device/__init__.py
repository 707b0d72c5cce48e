"""What a device allows and what steps, drafting and judging on it take, model by model."""
