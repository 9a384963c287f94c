"""The longest document that trains: a training with one feature more at a time, each until the device's memory is full."""
