"""Training of models with recurrent layers, such as linear attention, on packed documents."""
