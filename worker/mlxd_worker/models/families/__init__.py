"""How models of each kind are computed; which families are of a kind, their descriptions say."""
