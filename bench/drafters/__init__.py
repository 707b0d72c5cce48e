"""All drafters in one table: tokens per round, step costs, speed, and what follows from them."""
