"""What a training is worth: rates, operations, memory and where the time of a step goes."""
