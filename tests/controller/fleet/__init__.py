"""Tests of the fleet: nodes, agents and what they tell each other."""
