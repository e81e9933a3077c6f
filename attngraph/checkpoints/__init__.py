"""Reads the folder that a model of transformers was saved in: its class, weights and inputs."""
