"""What a precision costs in loss: recipes and matrices of the experiment, its design, and the tables of its result files."""
