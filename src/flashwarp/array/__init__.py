"""Arrays in a storage: opening, indexing, calls, and what they leave behind."""
