"""The small tasks that come with the package: prompts, rewards, and demonstrations for warm-up."""
