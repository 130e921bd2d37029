"""Models that do not generate: embeddings, classes, scores and rewards of texts."""
