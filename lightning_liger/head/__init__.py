"""The LM head, fused with whatever the user's code asks of its logits."""
