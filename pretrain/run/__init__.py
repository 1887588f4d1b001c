"""What happens in a run beside the loop itself: building, resuming, evaluating, stopping."""
