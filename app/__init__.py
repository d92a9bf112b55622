"""The service around the cache: settings, admin API, metadata store, command line, tiers and engines."""
