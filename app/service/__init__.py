"""The service around an engine: offloading, its supervision, and the HTTP server."""
