"""The process of `kvferry serve`, and the checks before it starts."""
