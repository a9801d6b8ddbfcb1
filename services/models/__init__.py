"""The model service: pulls prompts from the pools' work queues and has them answered."""
