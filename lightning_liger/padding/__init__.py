"""Padding removal at the backbone's boundary."""
