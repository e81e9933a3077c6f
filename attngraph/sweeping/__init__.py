"""Many compiles, in processes of their own: what they are, where they run, what came of them."""
