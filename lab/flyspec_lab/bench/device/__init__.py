"""Times of steps and proposals on a device, model by model, against its bandwidth."""
