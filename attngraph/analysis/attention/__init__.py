"""What surrounds a softmax: scores, roles, context, the site as a whole, or why it is none."""
