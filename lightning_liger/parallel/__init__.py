"""FSDP2 for modules that know nothing of it: one function, one step of it, each with all that it needs as arguments."""
