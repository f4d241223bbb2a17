"""The one owner of the scheduler's state, and what carries out its actions."""
