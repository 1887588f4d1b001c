"""What low precision makes of a tensor, in FP32 arithmetic that runs on any device and agrees bit for bit with TE."""
