"""The host pool while it runs: recovery after a restart, resizing, and checks of its file."""
