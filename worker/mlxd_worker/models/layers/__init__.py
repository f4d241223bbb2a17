"""What layers of several families are made of."""
