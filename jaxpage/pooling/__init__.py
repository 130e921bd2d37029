"""Embeddings, classes, scores and rewards of whole texts: models that do not generate."""
