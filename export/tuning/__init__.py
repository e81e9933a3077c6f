"""The forms that this machine runs fastest, measured."""
