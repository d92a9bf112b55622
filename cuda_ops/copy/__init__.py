"""Copy engines: the interface, device layouts, copy planning, and the engine for host memory."""
