"""Steps of `autopipe profile`."""
