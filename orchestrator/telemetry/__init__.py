"""What is told of generations and of the services behind them: metrics, spans, log lines."""
