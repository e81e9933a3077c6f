"""The driver: the steps of a compile, in their order."""
