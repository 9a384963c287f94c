"""AdamW for all parameters at once, with state in bf16 where that is asked for."""
