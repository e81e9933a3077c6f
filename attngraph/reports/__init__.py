"""What was done and measured, and what attentions look at, as data and as pages."""
