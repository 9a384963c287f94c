"""Kernels that compute attention inside each document of a packed batch, and how one is chosen."""
