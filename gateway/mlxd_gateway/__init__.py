"""The HTTP APIs of OpenAI, Anthropic and Ollama: a client of the controller, and nothing else."""
