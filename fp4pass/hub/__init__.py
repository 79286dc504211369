"""Show a folder on a hub: its model card, and its upload to Hugging Face."""
