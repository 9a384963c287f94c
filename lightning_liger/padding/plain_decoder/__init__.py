"""Padding removal in decoders written in plain PyTorch."""
