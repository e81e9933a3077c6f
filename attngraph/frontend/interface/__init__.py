"""How a module is called, what it returns and what it holds."""
