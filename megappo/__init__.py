"""megappo: PPO for language models on Megatron shards."""

__version__ = "0.1.0"
