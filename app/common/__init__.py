"""What every folder of the app may use: threads, discovery, times, folders and errors of calls."""
