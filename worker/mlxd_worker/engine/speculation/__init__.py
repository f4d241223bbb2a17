"""Several tokens a step: guesses, what they are worth, and the pass that judges them."""
