"""Ways to forget on linear models and on networks, and how well they do."""
