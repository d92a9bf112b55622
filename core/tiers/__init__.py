"""The tier protocol, and the client that core uses tiers through."""
