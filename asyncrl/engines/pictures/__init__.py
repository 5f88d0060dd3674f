"""Pictures in prompts: what a model's processor makes of them, once for a group, and where the model sees them."""
