"""What every pass stands on: the manager, local rules, checked rewrites and their evidence."""
