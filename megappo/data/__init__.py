"""Data: tokenizers, rows from files and the hub, prompts as token ids, and their resumable order. No tensors."""
