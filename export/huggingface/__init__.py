"""Models of Hugging Face's `transformers`, from a folder, with adapters, and written back. Nothing is fetched."""
