"""The evidence: recipes, matrices and design of the experiments, and the tables of results."""
