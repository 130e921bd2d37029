"""Pictures and videos in prompts: from pixels to the embeddings that stand at their placeholders."""
