"""A checkpoint's folder in, and a folder out that other runtimes open."""
