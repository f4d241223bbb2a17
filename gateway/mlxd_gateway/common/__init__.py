"""What all APIs have in common: bodies, what becomes of fields, questions, answers, failures."""
