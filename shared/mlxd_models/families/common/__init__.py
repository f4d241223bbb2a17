"""What descriptions of several families are made of."""
