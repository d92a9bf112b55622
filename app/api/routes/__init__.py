"""Routes of the admin API, one file per resource."""
