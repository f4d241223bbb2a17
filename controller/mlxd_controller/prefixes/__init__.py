"""Parts of prompts on disk: one folder, one budget for all models, and who gets how much of it."""
