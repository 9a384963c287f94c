"""MLPs in chunks of tokens: what lies between an MLP's input and its output exists for one chunk at a time."""
