"""Model files, read without running what they may carry."""
