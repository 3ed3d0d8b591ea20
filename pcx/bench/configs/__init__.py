"""One module per table of the paper: its figures, the settings behind them, and the command that makes ours."""
