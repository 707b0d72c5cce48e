"""What trained parts and FLy keep on texts that nothing was trained on, as the FLy paper asks."""
