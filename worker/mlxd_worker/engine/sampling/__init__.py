"""From logits to tokens: penalties, truncation, draws, log-probabilities."""
