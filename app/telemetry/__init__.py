"""What is measured and said: history, events, balance, the curve, traces and logs."""
