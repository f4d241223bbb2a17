"""The chats: made from the stories by rule, packed for training, and judged on held-out names."""
