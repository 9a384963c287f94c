"""What each feature is worth on the user's own module and data: tokens per second, memory, and the same loss."""
