"""Programs for chips that are not here: whether a model fits them, and how fast it can be at best."""
