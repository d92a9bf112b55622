"""Code that touches KV bytes: the host pool and the copy engines. Contains no policy."""
