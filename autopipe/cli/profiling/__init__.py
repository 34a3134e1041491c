"""What `autopipe profile` does."""
