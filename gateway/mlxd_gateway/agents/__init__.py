"""What agents change from turn to turn in their prompts, and the rules that keep prefixes equal."""
