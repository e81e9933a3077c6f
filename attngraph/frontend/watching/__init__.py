"""What is seen while a model is traced: the user's lines, and what its code asks of sizes."""
