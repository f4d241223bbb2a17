"""The HTTP APIs of OpenAI, Anthropic, Ollama and Cohere: a client of the controller alone."""
