"""Policies as operators set them: what they look like in JSON, and how they are kept across restarts."""
