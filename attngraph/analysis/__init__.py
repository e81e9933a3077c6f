"""What is true of a graph, read without changing it. Imports the IR and the dialect only."""
