"""Every difference between answers that was excused, for the end of the run to print."""

EXCUSES: list[str] = []
