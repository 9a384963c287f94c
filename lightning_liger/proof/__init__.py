"""What was applied is proved in the user's own training: that it ran, and that it computes the same."""
