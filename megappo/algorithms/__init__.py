"""Pure tensor functions of PPO: KL, advantages, losses and their global means. No models, ranks or configuration."""
