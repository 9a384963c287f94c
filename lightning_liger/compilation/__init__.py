"""Blocks compiled once for all layers of a kind, and replayed as CUDA graphs where launches are what a step waits for."""
