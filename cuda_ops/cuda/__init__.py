"""The copy engine for CUDA devices, and what it needs of the driver."""
