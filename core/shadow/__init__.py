"""Shadow caches: simulations of other pools, policies and store modes, by the keys of real requests."""
