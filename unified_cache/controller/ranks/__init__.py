"""Several ranks, one decision: what each may do differs, so what all do is agreed."""
