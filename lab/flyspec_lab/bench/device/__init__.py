"""Times of steps, drafting and judging on a device, model by model, against its bandwidth."""
