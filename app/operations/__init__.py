"""What operators change: policies, limits of tenants, resets and flushes of tiers."""
