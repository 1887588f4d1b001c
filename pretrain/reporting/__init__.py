"""How runs are put side by side: what makes a pair fair, tables, curves and panels. Reads files only, imports no torch."""
