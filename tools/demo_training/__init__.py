"""How the demo model is made: corpus, tokenizer, training, export and the held-out figure.

Nothing here is imported by the product. `tools/train_demo_model.py` is the only entry.
"""
