"""The environment service: holds shared worlds that agents act in and hear from."""
