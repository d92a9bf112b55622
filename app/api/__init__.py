"""The admin API: what an operator may see and steer over HTTP while the engine serves."""
