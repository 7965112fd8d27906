"""Settings of caches, services, replays and plans: described once, read from one file, variables and flags."""
