"""How decoder blocks run fastest on this device, in these shapes: candidates are timed, the fastest that fits is kept."""
