"""Everything that touches KV bytes: the host pool and the copy engines. It knows no policy."""
