"""Target models: one file per family, ``layers.py`` for what they share, ``loading.py`` for files."""
