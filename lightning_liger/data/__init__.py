"""Batches by token count: lengths are measured once, and every rank gets full batches of like cost."""
