"""What the tiers below the host pool are made of: how one is opened, run on threads, and kept in files."""
