"""Models with layers that have a state, such as a linear attention, on packed documents."""
